# SPDX-License-Identifier: Apache-2.0
"""The tasks of a simulated world, and the locks and events that they share."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any, ClassVar


class SimulationError(AssertionError):
    """A run has broken a rule. The text begins with the name of the rule and a colon."""


class Stop(BaseException):
    """Ends the tasks of a run that is over."""


class _Thread:
    """A thread that runs tasks of many runs, one after the other, because the start of a thread costs 60 us."""

    _idle: ClassVar["list[_Thread]"] = []

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        self.ident: int = 0
        threading.Thread(target=self._serve, name="simulated", daemon=True).start()

    @classmethod
    def give(cls, work: Callable[[], None]) -> "_Thread":
        """Run a function on an idle thread."""
        thread = cls._idle.pop() if cls._idle else cls()
        thread._work = work
        thread._wake.release()
        return thread

    def _serve(self) -> None:
        self.ident = threading.get_ident()
        while True:
            self._wake.acquire()
            work, self._work = self._work, None
            if work is not None:
                work()
            del work
            self._idle.append(self)


class Task:
    """A thread of the simulated driver.

    Attributes:
        waits_for: the point that it is at, for messages.
        is_ready: returns whether it can continue; None if it can.
        due: the time at which it continues at the latest.
        interrupted: whether it continues with a KeyboardInterrupt.
        held: the locks that it holds.
    """

    def __init__(self, world: Any, number: int, name: str, work: Callable[[], object]) -> None:
        self.name = name
        self.number = number
        self.waits_for: str = "starts"
        self.is_ready: Callable[[], object] | None = None
        self.due: float | None = None
        self.interrupted: bool = False
        self.is_done: bool = False
        self.held: list[SimulatedLock] = []
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ended = threading.Lock()
        self.ended.acquire()
        self._world = world
        self._work: Callable[[], object] | None = work
        self._context = contextvars.copy_context()
        self.thread = _Thread.give(self._run)

    def _run(self) -> None:
        world = self._world
        self.turn.acquire()
        try:
            if not world.is_over and self._work is not None:
                world.current = self
                self._context.run(self._work)
        except Stop:
            pass
        except KeyboardInterrupt as error:
            if self not in world.interrupted:
                world.fail(error)
        except BaseException as error:  # noqa: BLE001  the run raises it
            world.fail(error)
        if self.held and not world.is_over:
            world.fail(SimulationError(f"lock kept: {self.name} has ended with {self.held[0].name}"))
        self._work = None
        world.end_task(self)
        self.ended.release()


class SimulatedLock:
    """A lock that knows which task holds it, which may take it again. To take and to release it are points.

    No task may wait for something else than a lock while it holds one.
    """

    def __init__(self, world: Any, name: str) -> None:
        self.name = name
        self._world = world
        self._depth = 0
        self.owner: Task | None = None
        self._takes, self._releases = f"takes {name}", f"releases {name}"

    def locked(self) -> bool:
        """Return whether a task holds it."""
        return self.owner is not None

    def _is_free(self) -> bool:
        return self.owner is None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, and return whether that succeeded, as `threading.Lock.acquire` does."""
        world = self._world
        me = world.current
        if me is not None and self.owner is me:
            self._depth += 1
            return True
        waits = blocking and timeout != 0
        world.point(
            self._takes,
            self._is_free if waits else None,
            world.now() + timeout if waits and timeout > 0 else None,
        )
        if self.owner is not None:
            return False
        self.owner, self._depth = me, 1
        if me is not None:
            me.held.append(self)
        return True

    def release(self) -> None:
        """Release the lock."""
        world = self._world
        if world.is_over:
            return
        if self.owner is not world.current:
            raise world.fail(SimulationError(f"lock of another task: {world.who} releases {self.name}"))
        self._depth -= 1
        if self._depth or self.owner is None:
            return
        self.owner.held.remove(self)
        self.owner = None
        world.point(self._releases)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedEvent:
    """An event that tasks wait for."""

    def __init__(self, world: Any, name: str) -> None:
        self.name = name
        self._world = world
        self._is_set = False

    def set(self) -> None:
        """Let the tasks that wait continue."""
        self._is_set = True
        self._world.point(f"sets {self.name}")

    def is_set(self) -> bool:
        """Return whether it has been set."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, and return whether it is."""
        self._world.wait_for(f"waits for {self.name}", self.is_set, timeout)
        return self._is_set
