# SPDX-License-Identifier: Apache-2.0
"""The seam to the clock, to threads and to Ray's objects, which the simulation of interleavings replaces.

Membership, and the collection of replies, use these functions only, so that what runs in the simulation is the code
that runs in a driver.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import ray

from fairlead_placement.spi import OneTimeEvent, run_in_thread


class Event(Protocol):
    """What `threading.Event` offers."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Lock(AbstractContextManager[Any], Protocol):
    """What `threading.Lock` offers in a `with` statement."""

    def locked(self) -> bool: ...


class World(Protocol):
    """Everything that lets one thread run before another one, or takes time."""

    def now(self) -> float:
        """Return the time in seconds, which only grows."""

    def lock(self) -> Lock:
        """Return a lock that one thread at a time holds, for a time without waits."""

    def event(self) -> Event:
        """Return an event that has not happened."""

    def spawn(self, name: str, work: Callable[[], object]) -> None:
        """Run a function on a thread of its own, in the context of the caller."""

    def thread(self) -> int:
        """Return the number of the calling thread."""

    def wait(
        self, refs: Sequence[Any], *, num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[list[Any], list[Any]]:
        """Wait as `ray.wait` does."""

    def get(self, refs: Sequence[Any], *, timeout: float | None) -> list[Any]:
        """Return values as `ray.get` does."""


class RealWorld:
    """The world of a driver."""

    lock = staticmethod(threading.Lock)
    event = staticmethod(OneTimeEvent)
    thread = staticmethod(threading.get_ident)

    def now(self) -> float:
        """Return `time.monotonic()`, which a test may replace."""
        return time.monotonic()

    def spawn(self, name: str, work: Callable[[], object]) -> None:
        """Start a thread that never starts a Ray; at the exit of the interpreter, which starts none, run it here."""
        try:
            run_in_thread(name, contextvars.copy_context().run, work)
        except RuntimeError:
            work()

    def wait(
        self, refs: Sequence[Any], *, num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[list[Any], list[Any]]:
        """Call `ray.wait`."""
        done: tuple[list[Any], list[Any]] = ray.wait(
            list(refs), num_returns=num_returns, timeout=timeout, fetch_local=fetch_local
        )
        return done

    def get(self, refs: Sequence[Any], *, timeout: float | None) -> list[Any]:
        """Call `ray.get`."""
        values: list[Any] = ray.get(list(refs), timeout=timeout)
        return values


_world: World = RealWorld()


def world() -> World:
    """Return the world that everything runs in."""
    return _world


def now() -> float:
    """Return the time in seconds, which only grows."""
    return _world.now()


@contextlib.contextmanager
def replaced_by(other: World) -> Iterator[None]:
    """Run in another world during a block; for the simulation."""
    global _world
    before, _world = _world, other
    try:
        yield
    finally:
        _world = before
