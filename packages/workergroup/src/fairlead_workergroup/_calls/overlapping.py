# SPDX-License-Identifier: Apache-2.0
"""The unfinished calls of workers whose async methods overlap.

Ray delivers a call to such a worker when its arguments are there, which may be after a request that was sent later.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from .._deadline import Deadline
from .._ray_private import still_referenced
from .._transport.futures import end_of, is_message, wait

# Finished calls are dropped whenever there are more than this, or twice the unfinished ones.
MOST_NOTED = 4096


class OverlappingCalls:
    """The calls of one group. The lock of those who send protects it."""

    def __init__(self) -> None:
        # Ids and weak references: others would keep the results alive.
        self._ids: list[bytes] = []
        self._messages: list[weakref.ref[Any]] = []
        self._most = MOST_NOTED

    def note(self, futures: Iterable[Any]) -> None:
        """Note a call that has been sent, given by the future of each worker."""
        if len(self._ids) + len(self._messages) >= self._most:
            self._most = max(MOST_NOTED, 2 * self._forget_finished(0.0))
        for future in futures:
            end = end_of(future)
            if is_message(end):
                self._messages.append(weakref.ref(end))
            else:
                self._ids.append(end.binary())

    def wait(self, deadline: Deadline) -> bool:
        """Wait for all calls whose results somebody still refers to; return whether they end by the deadline."""
        return not self._forget_finished(deadline.left())

    def _forget_finished(self, timeout_s: float | None) -> int:
        """Wait for the calls, forget those that have finished, and return the number of the others."""
        noted = still_referenced(self._ids) if self._ids else []
        noted += [end for message in self._messages if (end := message()) is not None]
        unfinished: list[Any] = []
        if noted:
            _, unfinished = wait(noted, num_returns=len(noted), timeout=timeout_s, fetch_local=False)
        self._ids = [end.binary() for end in unfinished if not is_message(end)]
        self._messages = [weakref.ref(end) for end in unfinished if is_message(end)]
        return len(unfinished)
