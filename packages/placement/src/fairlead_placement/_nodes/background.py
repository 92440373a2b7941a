# SPDX-License-Identifier: Apache-2.0
"""Runs functions on background threads, for as long as their callers wait, and longer; and events to wait for."""

import _thread
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .._ray_private import connection, never_connect
from ..exceptions import PlacementError

_T = TypeVar("_T")
# The name of a thread, unless its function has one of its own.
IO = "fairlead-io"


@dataclass(eq=False)
class OneTimeEvent:
    """An event of threads, of which Ctrl-C may interrupt any operation.

    A wait for `threading.Event` that is interrupted when it ends raises RuntimeError for a lock that it does not have.
    """

    _has_happened: bool = field(default=False, init=False)
    # Each thread that this wakes up wakes up the next one.
    _wake: "queue.SimpleQueue[None]" = field(default_factory=queue.SimpleQueue, init=False)

    def set(self) -> None:
        """Note that the event has happened."""
        self._has_happened = True
        self._wake.put(None)

    def is_set(self) -> bool:
        """Return whether the event has happened."""
        return self._has_happened

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event has happened; return whether it has within the time."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        # A signal that comes just before a wait does not end it. Python handles it after the wait, so within 0.5 s.
        while not self._has_happened and (left := ends - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=min(left, 0.5))
                self._wake.put(None)
        return self._has_happened


@dataclass(eq=False)
class Job(Generic[_T]):
    """A function on a background thread."""

    began: float  # by `time.monotonic`
    on: object | None = None  # the connection to Ray for which it is called; None for any
    future: Future[_T] = field(default_factory=Future)
    # When the thread holds no references any more: Ray must not be shut down while a thread drops some.
    over: OneTimeEvent = field(default_factory=OneTimeEvent)

    def result(self, timeout_s: float, undo: Callable[[_T], object] | None = None) -> _T:
        """Return what the function returns, or raise its exception; a TimeoutError if it is late, and goes on.

        `undo` reverts what the function did if it returns after this call has ended. After an interrupt this call
        waits for the function as long as it would have.
        """
        ends = time.monotonic() + timeout_s
        try:
            if not self.over.wait(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
        except BaseException as error:
            if undo is not None:
                self.future.add_done_callback(lambda future: future.exception() or undo(future.result()))
                if not isinstance(error, Exception):
                    self.over.wait(max(0.0, ends - time.monotonic()))
            raise
        return self.future.result()


def run_in_thread(function: Callable[..., _T], *args: Any, name: str = IO, on: object | None = None) -> Job[_T]:
    """Call a function on a thread that never starts a Ray and does not keep the process alive; return the job.

    Signal handlers and the garbage collector may call this at any moment, because it takes no lock and waits for
    nothing. While the interpreter ends, it calls the function itself.

    Args:
        function: the function.
        args: its arguments.
        name: the name of the thread.
        on: the connection to Ray without which the function is not called; None if it needs none.
    """
    job: Job[_T] = Job(time.monotonic(), on)
    work = [function, *args]
    try:
        _thread.start_new_thread(_run, (job, name, work))
    except RuntimeError:
        _run(job, "", work)
    return job


def _run(job: Job[Any], name: str, work: list[Any]) -> None:
    """Call a function with its arguments on a thread that gets a name, or on that of the caller if there is none.

    No reference to them is left when the job is over.
    """
    if name:
        threading.current_thread().name = name
        never_connect()
    function, *args = work
    work.clear()
    try:
        if job.on is not None and connection() != job.on:
            raise PlacementError("Ray was shut down before a request was sent to its head. Connect to it again.")
        job.future.set_result(function(*args))
    except BaseException as error:  # noqa: BLE001  whoever waits raises it
        job.future.set_exception(error)
    del function, args
    job.over.set()
