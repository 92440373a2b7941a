# SPDX-License-Identifier: Apache-2.0
"""The methods of the user's class that a group calls when its membership changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._world import Deadline
from .call import Call, dispatch
from .core import Core
from .plan import CallOptions, Recipients


@dataclass(eq=False)
class Hooks:
    """These methods; None for none."""

    restart: str | None  # restarted workers run it first
    resize: str | None  # all workers run it in the new epoch of a resize
    timeout_s: float  # of each of them
    core: Core = field(init=False)  # set before the first change

    def check(self) -> None:
        """Check that the class has these methods, and that they take the arguments that they get."""
        for name in (self.restart, self.resize):
            if name is not None:
                self.core.described.worker_class.method(name).check(0, ())

    def on_restart(self, ranks: Sequence[int], deadline: Deadline) -> list[Call]:
        """Send `Restart.method` to ranks; do not wait."""
        return [] if self.restart is None else [self._send(self.restart, ranks, deadline)]

    def on_resize(self, ranks: Sequence[int], deadline: Deadline) -> list[Call]:
        """Send `on_resize` to ranks; do not wait."""
        return [] if self.resize is None else [self._send(self.resize, ranks, deadline)]

    def _send(self, method: str, ranks: Sequence[int], deadline: Deadline) -> Call:
        options = CallOptions(timeout=deadline.left(at_most=self.timeout_s), discard=True)
        recipients = Recipients(list(ranks), [], [False] * len(ranks))
        found = self.core.described.worker_class.find(method)
        return dispatch(self.core, None, found, recipients, (), {}, options, blocks=True, is_hook=True)
