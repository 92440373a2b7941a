# SPDX-License-Identifier: Apache-2.0
"""The methods of the user's class that a group calls when its membership changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._lifecycle.restart import UserMethods
from .call import dispatch
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
        """Check that the class has these methods, and that they take the arguments that they get.

        Raises:
            AttributeError, TypeError: it does not, or they do not.
        """
        for name in (self.on_restart, self.on_resize, self.on_handover):
            if name is not None:
                sender.method(name).check((), {})
        if self.on_handover is not None and self.on_restart is not None:
            sender.method(self.on_restart).check((None,), {})

    def methods(self, sender: Sender) -> UserMethods:
        """Return what runs these methods on workers."""

        def send(method: str, ranks: Sequence[int], args: Sequence[Column] = (), *, discard: bool = True) -> Execution:
            options = CallOptions(timeout=self.timeout_s, discard=discard)
            recipients = Recipients(list(ranks), [] if discard else list(ranks), [not discard] * len(ranks))
            # The calls that wait do so for this change, so this one must not wait behind them.
            return dispatch(sender, None, method, recipients, args, {}, options, may_wait=False)

        def run_on_restart(ranks: Sequence[int], values: Mapping[int, Any]) -> None:
            if self.on_restart is None:
                return
            given = [rank for rank in ranks if rank in values]
            if rest := [rank for rank in ranks if rank not in values]:
                send(self.on_restart, rest).result()
            if given:
                column = Column([values[rank] for rank in given], range(len(given)))
                send(self.on_restart, given, [column]).result()

        def send_on_resize(ranks: Sequence[int]) -> dict[int, Any]:
            if self.on_resize is None:
                return {}
            call = send(self.on_resize, ranks)
            return dict(zip(call.ranks, call.completions.values(), strict=True))

        def run_on_handover(ranks: Sequence[int]) -> dict[int, Any]:
            if self.on_handover is None or not ranks:
                return {}
            call = send(self.on_handover, ranks, discard=False)
            call.result()
            return dict(zip(call.ranks, call.futures, strict=True))

        return UserMethods(run_on_restart, send_on_resize, run_on_handover)
