# SPDX-License-Identifier: Apache-2.0
"""The seam to the clock, to threads and to Ray's objects, which the simulation of interleavings replaces; deadlines.

Membership, and the collection of replies, use these functions only, so that what runs in the simulation is the code
that runs in a driver.
"""

import contextvars
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray

from fairlead_placement.extension import OneTimeEvent, connection, run_in_thread

from .exceptions import WorkerGroupError

Event = OneTimeEvent
_Key = TypeVar("_Key", int, tuple[int, str])  # a rank, or that with what it does


class World:
    """Everything that lets one thread run before another one, or takes time."""

    # Reentrant: a signal handler or a finalizer may run on the thread that holds one.
    lock: Callable[[], AbstractContextManager[Any]] = staticmethod(threading.RLock)
    event = staticmethod(OneTimeEvent)
    thread = staticmethod(threading.get_ident)
    now = staticmethod(time.monotonic)
    get: Callable[..., list[Any]] = staticmethod(ray.get)

    def spawn(self, name: str, work: Callable[[], object]) -> None:
        """Run a function on a thread of its own, in the context of the caller, that never starts a Ray."""
        run_in_thread(contextvars.copy_context().run, work, name=name)

    def wait(self, refs: Sequence[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        done: tuple[list[Any], list[Any]] = ray.wait(list(refs), **options)
        return done


current = World()  # the world that everything runs in; the simulation replaces it


class Connection:
    """The Ray that a group was made on, which may be shut down before the group."""

    def __init__(self, group: object) -> None:
        self._group = group
        self._made_on = connection()

    @property
    def is_open(self) -> bool:
        """Whether it is still the Ray of this process."""
        return self._made_on == connection()

    def check(self) -> None:
        if self._made_on != connection():
            raise WorkerGroupError(f"{self._group!r}: the Ray it was made on has been shut down; make a new group")


def check_timeout(name: str, seconds: float | None) -> float | None:
    """Return a timeout in seconds, or None for no limit."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or None, got {seconds!r}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be finite and not negative, or None for no limit, got {seconds!r}")
    return float(seconds)


@dataclass(frozen=True)
class Deadline:
    """A moment of `now`, or never.

    >>> Deadline.after(None).left(), Deadline.after(None).left(at_most=5.0)
    (None, 5.0)
    """

    at: float | None = None
    limit_s: float | None = field(default=None, compare=False)  # what its maker was given, for errors

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        return cls(None if seconds is None else current.now() + seconds, seconds)

    def left(self, at_most: float | None = None) -> float | None:
        """Return the seconds until the deadline, 0 after it, and not more than `at_most`; None without a limit."""
        if self.at is None:
            return at_most
        left = max(0.0, self.at - current.now())
        return left if at_most is None else min(left, at_most)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed, with a millisecond of tolerance for waits that end early."""
        return self.at is not None and current.now() >= self.at - 0.001


NEVER = Deadline()


# How often a wait with a deadline looks at the clock, which a test may set forward.
SLICE_S = 0.5


def wait_for_event(event: Event, deadline: Deadline) -> bool:
    """Wait until an event has happened; return whether that was before the deadline."""
    while not event.wait(deadline.left() if deadline.at is None else deadline.left(at_most=SLICE_S)):
        if deadline.passed:
            return event.is_set()
    return True


# When a worker has failed, the others may wait for it in a collective, and nothing good comes of that.
OTHERS_S = 10.0
# How often a wait for workers looks whether it is to be given up.
LOOK_EVERY_S = 0.2
# Raises, or returns True, if a wait is to be given up.
Check = Callable[[], bool | None]


def wait_for(
    futures: Mapping[_Key, Any], until: Deadline, check: Check, *, patient: bool = False
) -> tuple[dict[_Key, Exception], list[_Key]]:
    """Wait for the futures of ranks; return the errors, and the late ones, by their keys.

    After a failure, the others have only a short time, unless the wait is patient.
    """
    key_of = {future: key for key, future in futures.items()}
    pending, errors = list(key_of), dict[_Key, Exception]()
    while pending:
        left = until.left(at_most=LOOK_EVERY_S)
        ready, pending = current.wait(pending, num_returns=len(pending), timeout=left, fetch_local=True)
        for future in ready:
            try:
                current.get([future], timeout=None)
            except Exception as error:  # noqa: BLE001  a method of the user may raise anything
                errors[key_of[future]] = error
        if errors and not patient:
            until, patient = Deadline.after(until.left(at_most=OTHERS_S)), True
        if pending and (until.passed or check()):
            break
    return errors, sorted(key_of[future] for future in pending)
