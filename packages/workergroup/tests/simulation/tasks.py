# SPDX-License-Identifier: Apache-2.0
"""The tasks of a simulated world, and the locks and events that they share."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any


class SimulationError(AssertionError):
    """A run has broken a rule. The text begins with the name of the rule and a colon."""


class Stop(BaseException):
    """Ends the tasks of a run that is over."""


class Task:
    """A thread of the simulated driver.

    Attributes:
        waits_for: the point that it is at, for messages.
        is_ready: returns whether it can continue; None if it can.
        due: the time at which it continues at the latest.
        interrupted: whether it continues with a KeyboardInterrupt.
        held: the locks that it holds.
        turn: released when it is its turn to run.
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
        self._world = world
        self._work = work
        run = contextvars.copy_context().run
        self.thread = threading.Thread(target=run, args=(self._run,), name=f"simulated {name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        world = self._world
        self.turn.acquire()
        try:
            if not world.is_over:
                world.current = self
                self._work()
        except Stop:
            pass
        except BaseException as error:  # noqa: BLE001  the run raises it
            if not (isinstance(error, KeyboardInterrupt) and self in world.interrupted):
                world.fail(error)
        world.end_task(self)


class SimulatedLock:
    """A lock that the task that holds it may take again. To take and to release it are points.

    No task may wait for something else than a lock while it holds one.
    """

    def __init__(self, world: Any, name: str) -> None:
        self.name = name
        self._world = world
        self._depth = 0
        self._owner: Task | None = None

    def __enter__(self) -> None:
        me = self._world.current
        if me is None or self._owner is not me:
            self._world.point(f"takes {self.name}", lambda: self._owner is None)
            self._owner = me
            me.held.append(self)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._world.is_over:
            return
        self._depth -= 1
        if not self._depth:
            self._world.current.held.remove(self)
            self._owner = None
            self._world.point(f"releases {self.name}")


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
