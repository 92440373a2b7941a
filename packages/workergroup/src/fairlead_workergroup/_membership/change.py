# SPDX-License-Identifier: Apache-2.0
"""The handle of an operation on its way, for those who wait for it and for those who carry it out."""

import contextvars
from collections.abc import Callable

from .. import _world
from .._world import NEVER, Deadline, wait_for_event
from ..exceptions import LateWorker, ResizeTimeoutError
from .operations import Operation
from .roster import Roster


class Change:
    """An operation on its way; calls wait for one that `is_shared`, and any of them may have requested it.

    It runs to its end, even if whoever has requested it does not wait any more, for example after Ctrl-C.
    """

    def __init__(self, operation: Operation, deadline: Deadline, roster: Roster, *, is_shared: bool) -> None:
        self.operation: Operation = operation
        self.deadline: Deadline = deadline
        self.asked_at: float = _world.current.now()
        self.is_shared: bool = is_shared
        self.ranks: tuple[int, ...] = ()  # those that it has started
        self._roster = roster
        self._context = contextvars.copy_context()
        self._done = _world.current.event()
        self._error: BaseException | None = None

    def run(self, work: Callable[["Change"], None]) -> None:
        """Do the work in the context of the thread that has requested it; keep what it raises."""
        try:
            self._context.run(work, self)
        except BaseException as error:  # noqa: BLE001  raised by those who wait
            self._error = error

    def finish(self) -> None:
        """Wake those who wait."""
        self._done.set()

    def wait(self, deadline: Deadline = NEVER) -> bool:
        """Wait until the change is over; return whether it is."""
        if not wait_for_event(self._done, deadline):
            return False
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def check(self) -> None:
        """Raise if the change has to be given up: the group or its Ray ends."""
        if self._roster.ending:
            raise self._roster.ended_error()
        self._roster.connection.check()

    @property
    def time_s(self) -> float | None:
        """How long the operation may take from its request; None for no limit."""
        return None if self.deadline.at is None else self.deadline.at - self.asked_at

    def late_error(self, reason: str, late: tuple[LateWorker, ...] = ()) -> ResizeTimeoutError:
        """Return the error of a change that could not begin in time."""
        return ResizeTimeoutError(self.operation.name, _world.current.now() - self.asked_at, late, reason)
