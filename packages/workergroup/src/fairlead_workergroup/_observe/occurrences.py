# SPDX-License-Identifier: Apache-2.0
"""From one look at the workers after another to what has happened between them, each thing once. Pure."""

from collections.abc import Iterator, Sequence

from .status import WorkerStatus

__all__ = ["Occurrences"]


class Occurrences:
    """Remembers what has been told.

    Args:
        slow_after_s: how long a call may go without progress before it is told of as slow.
    """

    def __init__(self, slow_after_s: float) -> None:
        self._slow_after_s = slow_after_s
        # Of each rank the incarnation that was told of as started, and as dead; the incarnation and call as slow, and
        # as stuck.
        self._started: dict[int, int] = {}
        self._dead: dict[int, int] = {}
        self._slow: dict[int, tuple[int, int]] = {}
        self._stuck: dict[int, tuple[int, int]] = {}

    def new(self, statuses: Sequence[WorkerStatus]) -> Iterator[tuple[str, WorkerStatus]]:
        """What has not been told yet: the kind of each event, and the worker it happened to."""
        for now in statuses:
            if now.state == "dead":
                self._started.setdefault(now.rank, now.incarnation)
                if self._dead.get(now.rank) != now.incarnation:
                    self._dead[now.rank] = now.incarnation
                    yield "worker-dead", now
            elif now.state not in ("starting", "restarting", "unknown"):
                yield from self._of_living(now)

    def not_stuck(self, rank: int) -> None:
        """It has got on before it could be told of."""
        self._stuck.pop(rank, None)

    def _of_living(self, now: WorkerStatus) -> Iterator[tuple[str, WorkerStatus]]:
        before = self._started.get(now.rank)
        if before != now.incarnation:
            self._started[now.rank] = now.incarnation
            yield "worker-started" if before is None else "worker-restarted", now
        call = (now.incarnation, now.calls)
        slow = now.method is not None and now.since_progress_s >= self._slow_after_s
        # A call that gets on and is slow again is the same slow call; one that is stuck again has got stuck again.
        if slow and self._slow.get(now.rank) != call:
            self._slow[now.rank] = call
            yield "call-slow", now
        if now.state != "stuck":
            self._stuck.pop(now.rank, None)
        elif self._stuck.get(now.rank) != call:
            self._stuck[now.rank] = call
            yield "worker-stuck", now
