# SPDX-License-Identifier: Apache-2.0
"""Tests of the copies of exceptions, which keep their types when a worker's host raises them."""

import copyreg
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayTaskError

from fairlead_workergroup._remote.host import host_class
from fairlead_workergroup._remote.progress import Record

from ..user_errors import HoldingError, NewError, PrefixError, StubbornError, TwoArgumentsError


class Raising:
    def fail(self, error):
        raise error


@pytest.fixture
def fail(monkeypatch):
    """Return a function that lets the host of a worker raise an error, and returns the error."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_task_id=lambda: ""))
    host = host_class("Raising", {"fail": "plain"}, concurrent=False, backpressure={})()
    host._fairlead_instance, host._fairlead_record = Raising(), Record(host._fairlead_methods)

    def fail(error):
        with pytest.raises(BaseException) as caught:
            host.fail(error)
        return caught.value

    yield fail
    os.close(host._fairlead_record._file)


@pytest.fixture
def make_copy(fail):
    """Return a function that lets a worker raise an error, and returns the one that arrives."""

    def arrive(error):
        copy = pickle.loads(ray.cloudpickle.dumps(RayTaskError("fail", "Traceback", fail(error)))).cause
        assert copy is not error
        return copy

    return arrive


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
    def test_type_text_and_attributes(self, make_copy, error):
        """The copy has the class, the text, the arguments, the attributes and the notes."""
        error.add_note("a note")
        kept = dict(vars(error))
        copy = make_copy(error)
        assert (type(copy), str(copy), repr(copy)) == (type(error), str(error), repr(error))
        assert vars(copy) == kept

    def test_what_does_not_pickle(self, make_copy):
        """Arguments keep their places, attributes are left out, and a note names both."""
        copy = make_copy(HoldingError("text", threading.Lock()))
        assert type(copy) is HoldingError
        assert (copy.text, copy.args) == ("text", ("text", "<lock>"))
        assert not hasattr(copy, "lock")
        assert copy.__notes__ == [
            "left out on the way from the worker, as it does not pickle: argument 1, attribute 'lock'"
        ]

    def test_references(self, make_copy, monkeypatch):
        """A reference is left out without being pickled, which would keep its object for the life of the worker."""
        pickled = []
        monkeypatch.setitem(copyreg.dispatch_table, ray.ObjectRef, lambda ref: (str, pickled.append(ref) or ()))
        reference = ray.ObjectRef(b"r" * 28)
        copy = make_copy(HoldingError("text", [reference]))
        assert (type(copy), copy.text, copy.args, pickled) == (HoldingError, "text", ("text", "<list>"), [])
        assert "argument 1 (holds a reference), attribute 'lock' (holds a reference)" in copy.__notes__[0]

    def test_what_cannot_be_copied(self, fail):
        """An exception that cannot be copied stays unchanged."""
        error = StubbornError(1, where="home")
        assert fail(error) is error
        assert vars(error) == {"where": "home"}
