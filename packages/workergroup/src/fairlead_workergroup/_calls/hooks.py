# SPDX-License-Identifier: Apache-2.0
"""The methods of the user's class that a group calls when its membership changes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _world
from .._lifecycle.delivery import Delivery, send_handover
from .._world import Deadline
from ..exceptions import CallTimeoutError
from .call import dispatch
from .errors import explain_failure
from .execution import Execution
from .plan import CallOptions, Column, Recipients
from .sender import Sender

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Hooks:
    """These methods; None for none."""

    restart: str | None  # restarted workers run it first
    resize: str | None  # all workers run it in the new epoch of a resize
    handover: str | None  # a worker runs it before its rank moves to another process; `restart` gets its result
    timeout_s: float  # of each of them
    delivery: Delivery
    sender: Sender = field(init=False)  # set before the first change

    def check(self) -> None:
        """Check that the class has these methods, and that they take the arguments that they get."""
        for name in (self.restart, self.resize, self.handover):
            if name is not None:
                self.sender.described.worker_class.method(name).check(0, ())
        if self.handover is not None and self.restart is not None:
            self.sender.described.worker_class.method(self.restart).check(1, ())

    def on_restart(self, ranks: Sequence[int], values: Mapping[int, Any], deadline: Deadline) -> list[Execution]:
        """Send `Restart.method` to ranks, with what was handed over by rank; do not wait."""
        if self.restart is None:
            return []
        calls = []
        if rest := [rank for rank in ranks if rank not in values]:
            calls.append(self._send(self.restart, rest, (), deadline))
        if given := [rank for rank in ranks if rank in values]:
            column = Column([values[rank] for rank in given], range(len(given)))
            calls.append(self._send(self.restart, given, [column], deadline))
        return calls

    def on_resize(self, ranks: Sequence[int], deadline: Deadline) -> list[Execution]:
        """Send `on_resize` to ranks; do not wait."""
        return [] if self.resize is None else [self._send(self.resize, ranks, (), deadline)]

    def _send(self, method: str, ranks: Sequence[int], args: Sequence[Column], deadline: Deadline) -> Execution:
        options = CallOptions(timeout=deadline.left(at_most=self.timeout_s), discard=True)
        recipients = Recipients(list(ranks), [], [False] * len(ranks))
        return dispatch(self.sender, None, method, recipients, args, {}, options, may_wait=False, passes=True)

    def hand_over(
        self, ranks: Sequence[int], deadline: Deadline, check: Callable[[], None], *, give_up: bool
    ) -> Mapping[int, Any]:
        """Run `on_handover` on workers that end; return references to what it returns, which the driver does not fetch.

        With `give_up`, leave out the workers that have not finished in time.
        """
        if self.handover is None or not ranks:
            return {}
        sender, began = self.sender, _world.current.now()
        members = sender.roster.now
        values, ends = dict[int, Any](), dict[int, Any]()
        for rank in ranks:
            values[rank], ends[rank] = send_handover(members[rank], self.handover)
        what = f"Replacing in {sender.roster.name_prefix}: {self.handover}"
        until = deadline.sooner(Deadline.after(self.timeout_s))
        errors, late = self.delivery.wait_for(ends, until, what, check, patient=give_up)
        if errors:
            raise explain_failure([ends[rank] for rank in errors], next(iter(errors.values())), sender)
        if late and not give_up:
            raise CallTimeoutError(self.handover, _world.current.now() - began, len(ranks), sender.late_workers(late))
        if late:
            logger.warning("Rank(s) %s are replaced without what they hand over: their node ends.", late)
        return {rank: value for rank, value in values.items() if rank not in late}
