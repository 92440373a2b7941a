# SPDX-License-Identifier: Apache-2.0
"""Exceptions keep their own type, text, attributes and notes when they arrive from workers."""

import threading

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, RemoteError


class TwoArgumentsError(Exception):
    """An exception that cannot be made from its `args`, as pickle does it."""

    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code = code


class PrefixError(ValueError):
    """An exception that is made from its `args` without an error, but with another text."""

    def __init__(self, code):
        super().__init__(f"failed with {code}")
        self.code = code


class HoldingError(OSError):
    """An exception with arguments and attributes that cannot be pickled."""

    def __init__(self, text, lock):
        super().__init__(text, lock)
        self.text, self.lock = text, lock


class NewError(Exception):
    """An exception whose own `__new__` takes other arguments too."""

    def __new__(cls, code, *, where):
        return super().__new__(cls, code)

    def __init__(self, code, *, where):
        super().__init__(f"{code} at {where}")


class StubbornError(Exception):
    """An exception that cannot be made without `__init__` either."""

    def __setstate__(self, state):
        raise RuntimeError("no")

    def __init__(self, code, *, where):
        super().__init__(code)
        self.where = where


ERRORS = {
    "KeyError": lambda: KeyError("a"),
    "OSError": lambda: OSError(2, "no such file", "name"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    "ExceptionGroup": lambda: ExceptionGroup("two", [ValueError(1), TwoArgumentsError(1, where="here")]),
    "TwoArgumentsError": lambda: TwoArgumentsError(3, where="home"),
    "PrefixError": lambda: PrefixError(5),
    "NewError": lambda: NewError(7, where="home"),
}


class Failing:
    """Fails in every way there is."""

    def fail(self, name):
        error = ERRORS[name]()
        error.add_note("a note")
        raise error

    def holding(self):
        raise HoldingError("text", threading.Lock())

    def holding_a_reference(self):
        raise HoldingError("text", [ray.put(1)])

    def stubborn(self):
        raise StubbornError(1, where="home")

    def items(self):
        yield 1
        raise PrefixError(5)

    async def later(self):
        raise PrefixError(6)

    def interrupted(self):
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def failing(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Failing) as group:
        yield group


@pytest.mark.parametrize("name", ERRORS)
def test_type_text_and_attributes(failing, name):
    """An exception arrives with its class, text, attributes and notes, whatever its constructor takes."""
    expected = ERRORS[name]()
    with pytest.raises(type(expected)) as caught:
        failing.call("fail", name).result()
    error = caught.value
    assert str(error).startswith(str(expected).partition(" (")[0])
    assert {key: value for key, value in vars(error).items() if key in vars(expected)} == vars(expected)
    assert "a note" in error.__notes__


def test_kinds_of_methods(failing):
    """An exception of a generator and of a coroutine arrives with its type too."""
    for method in ("items", "later"):
        with pytest.raises(PrefixError, match=r"^failed with \d(\n|$)"):
            failing.call(method).result()


@pytest.mark.parametrize("method", ["holding", "holding_a_reference"])
def test_what_does_not_pickle(failing, method):
    """What cannot be pickled, and what a reference keeps, is left out, and a note names it."""
    left_out = "left out on the way from the worker, as it does not pickle: argument 1, attribute 'lock'"
    with pytest.raises(HoldingError) as caught:
        failing.call(method).result()
    assert caught.value.text == "text"
    assert any(left_out in note for note in caught.value.__notes__), caught.value.__notes__


def test_what_cannot_be_copied(failing):
    """The text of an exception arrives that cannot be copied."""
    with pytest.raises(RemoteError, match="StubbornError"):
        failing.call("stubborn").result()


def test_interrupt(failing):
    """A KeyboardInterrupt in a worker is neither the caller's own nor a cancelled call, and ends no worker."""
    call = failing.call("interrupted")
    assert call.wait(60)
    with pytest.raises(RuntimeError, match="'interrupted' was interrupted in the worker"):
        call.result()
    assert {status.state for status in failing.get_worker_status()} == {"idle"}
