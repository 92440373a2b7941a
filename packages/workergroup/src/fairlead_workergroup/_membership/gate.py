# SPDX-License-Identifier: Apache-2.0
"""Who may send a call now: one thread at a time, so that all workers see one order, and none while an epoch begins."""

from collections.abc import Callable
from typing import TypeVar

from .. import _world
from .._world import Deadline, Event
from ..exceptions import WorkerGroupError

_T = TypeVar("_T")


class Gate:
    """Lets calls of a group pass. No thread waits while it holds the lock."""

    def __init__(self) -> None:
        # It protects the order of calls: a call is submitted to all of its workers before the next one.
        self._lock = _world.current.lock()
        self._inside: int | None = None
        self._is_closed = False
        self._waiting: list[Event] = []

    def run(self, submit: Callable[[], _T], deadline: Deadline, *, passes: bool = False) -> _T | None:
        """Call a function that submits one call, while no other thread does; None if the gate is closed for too long.

        The function must not wait. It `passes` a closed gate if it belongs to the change that has closed it.
        """
        me = _world.current.thread()
        while True:
            # Otherwise it would wait for itself. Another thread inside does not count.
            if self._inside == me and self._lock.locked():
                raise WorkerGroupError(
                    "A signal handler or a finalizer made a call while its thread was sending another call of the same "
                    "group. Set a flag in the handler, and make the call in the thread's own code."
                )
            # No lock is acquired outside of `with`: there Ctrl-C could come between it and the release.
            with self._lock:
                if passes or not self._is_closed:
                    try:
                        self._inside = me
                        return submit()
                    finally:
                        self._inside = None
                opens = _world.current.event()
                self._waiting.append(opens)
            if not wait_for_event(opens, deadline):
                return None

    def close(self) -> None:
        """Let no further call pass; one that is being submitted is submitted to its end."""
        with self._lock:
            self._is_closed = True

    def open(self) -> None:
        """Let calls pass again, and wake those that wait."""
        with self._lock:
            self._is_closed = False
            waiting, self._waiting = self._waiting, []
        for opens in waiting:
            opens.set()

    def wake(self) -> None:
        """Wake those that wait, because the group ends; without a lock, which a handler's own thread may hold."""
        self._is_closed = False
        for opens in list(self._waiting):
            opens.set()


# How often a wait with a deadline looks at the clock, which a test may set forward.
SLICE_S = 0.5


def wait_for_event(event: Event, deadline: Deadline) -> bool:
    """Wait until an event has happened; return whether that was before the deadline."""
    while not event.wait(deadline.left() if deadline.at is None else deadline.left(at_most=SLICE_S)):
        if deadline.passed:
            return event.is_set()
    return True
