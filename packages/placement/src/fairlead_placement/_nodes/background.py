# SPDX-License-Identifier: Apache-2.0
"""Runs functions on background threads, for as long as their callers wait, and longer; and events to wait for."""

import collections
import contextlib
import functools
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .._ray_private import never_connect

_T = TypeVar("_T")
# A thread that has nothing to do waits for the next function, unless so many do.
IDLE_KEPT = 4
# A signal such as Ctrl-C is handled within this time.
SIGNAL_S = 0.5


class OneTimeEvent:
    """An event of threads, of which Ctrl-C may interrupt any operation.

    A wait for `threading.Event` that is interrupted when it ends raises RuntimeError for a lock that it does not have.
    """

    def __init__(self) -> None:
        self._has_happened = False
        # A taken lock for each thread that waits. Single operations of the deque are all that threads share.
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def set(self) -> None:
        """Note that the event has happened."""
        self._has_happened = True
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft().release()

    def is_set(self) -> bool:
        """Return whether the event has happened."""
        return self._has_happened

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event has happened; return whether it has within the time."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        # A signal that comes just before a wait does not end it. Python handles it after the wait.
        while not self._has_happened and (left := ends - time.monotonic()) > 0:
            mine.acquire(timeout=min(left, SIGNAL_S))
        with contextlib.suppress(ValueError):  # it is not there after the event
            self._waiting.remove(mine)
        return self._has_happened


@dataclass(eq=False)
class Job(Generic[_T]):
    """A function on a background thread. `over` is set once it has returned and its thread holds no references.

    Ray must not be shut down while a thread drops references. `future` has the answer a moment earlier.
    """

    name: str
    function: Callable[[], _T] | None
    began: float
    future: Future[_T] = field(default_factory=Future)
    over: OneTimeEvent = field(default_factory=OneTimeEvent)

    def result(self, timeout_s: float, undo: Callable[[_T], object] | None = None) -> _T:
        """Return what the function returns.

        If this raises a TimeoutError or is interrupted, `undo` reverts what the function did when it returns. After an
        interrupt this waits for that until the timeout.
        """

        def revert(future: Future[_T]) -> None:
            if undo is not None and future.exception() is None:
                undo(future.result())

        try:
            if not self.over.wait(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
        except BaseException as error:
            if undo is not None and not isinstance(error, TimeoutError):
                self.over.wait(max(0.0, self.began + timeout_s - time.monotonic()))
            self.future.add_done_callback(revert)
            raise
        return self.future.result()

    def run(self) -> None:
        """Call the function. The thread then drops the job, and sets `over`."""
        function, self.function = self.function, None
        try:
            assert function is not None, "a job runs once"
            self.future.set_result(function())
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            self.future.set_exception(error)


_idle: collections.deque[queue.SimpleQueue[Job[Any]]] = collections.deque()
os.register_at_fork(after_in_child=_idle.clear)


def start(function: Callable[..., _T], *args: Any, name: str = "fairlead-head") -> Job[_T]:
    """Call a function on a daemon thread that never starts a Ray. `name` is the name of the thread until then."""
    job = Job(name, functools.partial(function, *args), time.monotonic())
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        try:
            threading.Thread(target=_serve, args=(jobs,), daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and starts no threads any more
            job.run()
            job.over.set()
            return job
    jobs.put(job)
    return job


def run_in_thread(name: str, function: Callable[..., _T], *args: Any) -> Future[_T]:
    """Call a function on a thread that never starts a Ray, and return the future of what it will return.

    Args:
        name: the name of the thread until then. It does not keep the process alive.
        function: the function.
        args: its arguments.
    """
    return start(function, *args, name=name).future


def _serve(jobs: "queue.SimpleQueue[Job[Any]]") -> None:
    never_connect()
    me = threading.current_thread()
    is_kept = True
    while is_kept:
        job = jobs.get()
        me.name = job.name
        job.run()
        me.name = "idle"
        over = job.over
        del job
        if is_kept := len(_idle) < IDLE_KEPT:
            _idle.append(jobs)
        over.set()
