# SPDX-License-Identifier: Apache-2.0
"""Exceptions that keep their own type: how they are copied."""

import threading

import pytest
import ray

from fairlead_workergroup._remote.host import make_portable


class TwoArgumentsError(Exception):
    """Cannot be made from its `args`, as pickle does it."""

    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code = code


class PrefixError(ValueError):
    """Is made from its `args` without an error, with another text."""

    def __init__(self, code):
        super().__init__(f"failed with {code}")
        self.code = code


class HoldingError(OSError):
    """Holds what does not pickle, in its arguments and its attributes."""

    def __init__(self, text, lock):
        super().__init__(text, lock)
        self.text, self.lock = text, lock


class NewError(Exception):
    """Its own `__new__` wants other arguments too."""

    def __new__(cls, code, *, where):
        return super().__new__(cls, code)

    def __init__(self, code, *, where):
        super().__init__(f"{code} at {where}")


class StubbornError(Exception):
    """Does not let itself be made without `__init__` either."""

    def __setstate__(self, state):
        raise RuntimeError("no")

    def __init__(self, code, *, where):
        super().__init__(code)
        self.where = where


def copied(error):
    make_portable(error)
    return ray.cloudpickle.loads(ray.cloudpickle.dumps(error))


class TestCopies:
    @pytest.mark.parametrize(
        "error",
        [
            KeyError("a"),
            OSError(2, "no such file", "name"),
            UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
            ExceptionGroup("two", [ValueError(1), TwoArgumentsError(1, where="here")]),
            TwoArgumentsError(3, where="home"),
            PrefixError(5),
            NewError(7, where="home"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_type_text_and_attributes(self, error):
        """The copy has the class, the text, the arguments, the attributes and the notes."""
        error.add_note("a note")
        kept = dict(vars(error))
        copy = copied(error)
        assert (type(copy), str(copy), repr(copy)) == (type(error), str(error), repr(error))
        assert vars(copy) == kept

    def test_what_does_not_pickle(self):
        """Arguments keep their places, attributes are left out, and a note names both."""
        copy = copied(HoldingError("text", threading.Lock()))
        assert type(copy) is HoldingError
        assert (copy.text, copy.args) == ("text", ("text", "<lock>"))
        assert not hasattr(copy, "lock")
        assert copy.__notes__ == [
            "left out on the way from the worker, as it does not pickle: argument 1, attribute 'lock'"
        ]

    def test_what_cannot_be_copied(self):
        """Such an exception is left as it was."""
        error = StubbornError(1, where="home")
        make_portable(error)
        assert vars(error) == {"where": "home"}
