# SPDX-License-Identifier: Apache-2.0
"""The methods of the user's class that a group calls when its membership changes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._deadline import NEVER, Deadline
from .._lifecycle.delivery import send_handover, wait_for
from .._lifecycle.restart import UserMethods
from ..exceptions import CallTimeoutError
from .call import dispatch
from .errors import explain_failure
from .execution import Execution
from .plan import CallOptions, Column, Recipients
from .sender import Sender


@dataclass(frozen=True)
class Hooks:
    """The names of these methods; None for none.

    Attributes:
        on_restart: restarted workers run it first.
        on_resize: all workers run it in the new epoch of a resize.
        on_handover: a worker runs it before its rank moves to another process, whose `on_restart` gets its result.
        timeout_s: how long each of them may take.

    Raises:
        ValueError: there is no method that receives what `on_handover` returns.
    """

    on_restart: str | None
    on_resize: str | None
    on_handover: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        if self.on_handover is not None and self.on_restart is None:
            raise ValueError("on_handover needs on_restart, the method that receives what a worker hands over")

    def check(self, sender: Sender) -> None:
        """Check that the class has these methods, and that they take the arguments that they get."""
        for name in (self.on_restart, self.on_resize, self.on_handover):
            if name is not None:
                sender.method(name).check((), {})
        if self.on_handover is not None and self.on_restart is not None:
            sender.method(self.on_restart).check((None,), {})

    def methods(self, sender: Sender) -> UserMethods:
        """Return what runs these methods on workers."""

        def send(
            method: str, ranks: Sequence[int], args: Sequence[Column] = (), deadline: Deadline = NEVER
        ) -> Execution:
            options = CallOptions(timeout=deadline.left(at_most=self.timeout_s), discard=True)
            recipients = Recipients(list(ranks), [], [False] * len(ranks))
            # The calls that wait do so for this change, so this one must not wait behind them.
            return dispatch(sender, None, method, recipients, args, {}, options, may_wait=False)

        def run_on_restart(ranks: Sequence[int], values: Mapping[int, Any], deadline: Deadline) -> None:
            if self.on_restart is None:
                return
            given = [rank for rank in ranks if rank in values]
            if rest := [rank for rank in ranks if rank not in values]:
                send(self.on_restart, rest, deadline=deadline).result()
            if given:
                column = Column([values[rank] for rank in given], range(len(given)))
                send(self.on_restart, given, [column], deadline).result()

        def send_on_resize(ranks: Sequence[int]) -> dict[int, Any]:
            if self.on_resize is None:
                return {}
            call = send(self.on_resize, ranks)
            return dict(zip(call.ranks, call.completions.values(), strict=True))

        def run_on_handover(ranks: Sequence[int]) -> dict[int, Any]:
            if self.on_handover is None or not ranks:
                return {}
            return hand_over(sender, self.on_handover, ranks, self.timeout_s)

        return UserMethods(run_on_restart, send_on_resize, run_on_handover)


def hand_over(sender: Sender, method: str, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
    """Run a method on workers that end; return references to what it returns, which the driver does not fetch.

    Raises:
        CallTimeoutError: workers had not finished it in time.
        WorkerFailureError: a worker was lost.
        Exception: the exception of the method.
    """
    now, began = sender.roster.snapshot(), time.monotonic()
    values, ends = dict[int, Any](), dict[int, Any]()
    for rank in ranks:
        values[rank], ends[rank] = send_handover(now[rank], method)
    errors, late = wait_for(ends, Deadline.after(timeout_s), f"Replacing in {sender.roster.name_prefix}: {method}")
    if errors:
        raise explain_failure([ends[rank] for rank in errors], next(iter(errors.values())), sender)
    if late:
        workers = sender.late_workers(late)
        raise CallTimeoutError(method, time.monotonic() - began, len(ranks), workers)
    return values
