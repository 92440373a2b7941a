# SPDX-License-Identifier: Apache-2.0
"""Functions that run on their own thread with a deadline, and are undone if they return too late."""

import os
import signal
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import HeadTimeoutError, PlacementError
from fairlead_placement._nodes import background
from fairlead_placement._nodes import head as _head
from fairlead_placement.extension import OneTimeEvent, ask_head, head_deadline, run_in_thread


def call_within(timeout_s, function, *args, undo=None):
    return run_in_thread(function, *args).result(timeout_s, undo)


def test_results():
    """The function's value is returned or its error raised, from another thread."""
    assert call_within(20, threading.get_ident) != threading.get_ident()
    assert call_within(20, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_within(20, divmod, 7, 0)
    with pytest.raises(TimeoutError, match="mine"):
        call_within(20, raise_error, TimeoutError("mine"))


def raise_error(error):
    raise error


def test_too_late(eventually):
    """A function that returns after the deadline is undone; one that fails after it is not."""
    answer, undone = threading.Event(), []
    for function in (lambda: answer.wait(60) and "value", lambda: answer.wait(60) and 1 / 0):
        with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
            call_within(0.1, function, undo=undone.append)
    assert undone == []
    answer.set()
    assert eventually(lambda: undone == ["value"])


@pytest.mark.parametrize("in_time", [True, False])
def test_interrupted(in_time, monkeypatch, eventually):
    """An interrupt undoes the function before it is raised, or later if the function does not return in time."""
    answer, undone, now = threading.Event(), [], [0.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def is_waiting():
        return sys._current_frames()[threading.main_thread().ident].f_code is OneTimeEvent.wait.__code__

    def interrupt():
        assert eventually(is_waiting)
        now[0] = 0.0 if in_time else 61.0
        os.kill(os.getpid(), signal.SIGINT)
        return answer.wait(0.2 if in_time else 60) or "value"

    with pytest.raises(KeyboardInterrupt):
        call_within(60.0, interrupt, undo=undone.append)
    assert undone == (["value"] if in_time else [])
    answer.set()
    assert eventually(lambda: len(undone) == 1)


def test_deadlines(monkeypatch):
    """A request gets what is left of the earliest deadline, but at least some seconds (seam: whether Ray runs)."""
    given = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(background.Job, "result", lambda job, timeout_s, undo: given.append(timeout_s))
    ask_head("count", len, "ab", timeout_s=0.3)
    with head_deadline(1000):
        ask_head("count", len, "ab")
        with head_deadline(100), head_deadline(5000):
            ask_head("count", len, "ab")
        with head_deadline(0):
            ask_head("count", len, "ab")
    with head_deadline():
        ask_head("count", len, "ab")
    assert given == [
        pytest.approx(0.3, abs=0.1),
        *(pytest.approx(seconds, abs=20) for seconds in (1000, 100, 0.9, 30)),
    ]
    assert ask_head("count", len, "ab") == 2  # without a limit, on this thread


def test_requests_like_a_late_one(monkeypatch, eventually):
    """While a request is late, others like it are not sent, and fail once it is as late as they would be.

    After the deadline of a block, no request gets the least time any more (seam: whether Ray runs).
    """
    answer, sent = threading.Event(), []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(_head, "LEAST_S", 0.2)

    def ask(**options):
        return ask_head("look", lambda: sent.append("look") or answer.wait(60), **options)

    for timeout_s in (0.2, 0.1, 0.2):
        with pytest.raises(HeadTimeoutError, match=r"a request to look; waited \d+\.\d s\."):
            ask(timeout_s=timeout_s)
    assert (sent, _head.head_is_silent(), _head.head_is_silent(60)) == (["look"], True, False)
    monkeypatch.setattr(background.Job, "result", lambda job, timeout_s, undo: timeout_s)
    with head_deadline(0):
        assert ask_head("count", len, "ab") == 0
    monkeypatch.undo()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    answer.set()
    assert eventually(lambda: not _head.head_is_silent())
    assert ask(timeout_s=60)
    assert sent == ["look"] * 2


def test_a_function_that_is_over_is_forgotten():
    """Nothing of a function stays alive on its thread."""

    class Value:
        pass

    value = weakref.ref(call_within(20, Value))
    assert value() is None


def test_no_request_on_another_ray(monkeypatch):
    """A request whose Ray has been shut down since it was made is not sent (seam: the connection)."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(_head, "connection", lambda: "one")
    monkeypatch.setattr(background, "connection", lambda: "two")
    with pytest.raises(PlacementError, match="Ray was shut down before a request was sent"):
        ask_head("look", pytest.fail, "sent", timeout_s=20)
