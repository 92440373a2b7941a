# SPDX-License-Identifier: Apache-2.0
"""The board on which source ranks offer buckets, and target ranks say which they have read.

Both ends run one long request each, so that no other method comes between two buckets. Requests of the driver cannot
reach them then. It is an actor of its own, so it works across nodes, and ends with the driver.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Board:
    """The buckets that are ready. An answer of a method is empty, or says why there is nothing to wait for."""

    def __init__(self) -> None:
        self._epoch = -1
        self._stopped = False
        self._offers: dict[tuple[int, int], Any] = {}
        self._finished: set[tuple[int, int, int]] = set()
        self._left: set[int] = set()
        self._changed = asyncio.Condition()

    async def begin(self, epoch: int) -> None:
        """Begin an attempt; forget the one before."""
        async with self._changed:
            self._epoch, self._stopped = epoch, False
            self._offers, self._finished, self._left = {}, set(), set()
            self._changed.notify_all()

    async def stop(self, epoch: int) -> None:
        """End all waits of an attempt."""
        async with self._changed:
            self._stopped = self._stopped or epoch == self._epoch
            self._offers = {}
            self._changed.notify_all()

    async def offer(self, epoch: int, source: int, number: int, staged: Any, readers: Sequence[int]) -> str:
        """Show where a bucket of a source rank is, until its readers have read it; return why they will not."""
        key = source, number
        async with self._changed:
            if epoch == self._epoch and not self._stopped:
                self._offers[key] = staged
                self._changed.notify_all()
            reason = await self._wait(
                epoch, lambda: all(one in self._left or (*key, one) in self._finished for one in readers)
            )
            if not reason:
                self._offers.pop(key, None)
                self._finished.difference_update([(*key, one) for one in readers])
            return reason

    async def take(self, epoch: int, source: int, number: int) -> tuple[str, Any]:
        """Return where a bucket is, when it is there; or why it will not come."""
        async with self._changed:
            reason = await self._wait(epoch, lambda: (source, number) in self._offers)
            return reason, None if reason else self._offers[source, number]

    async def finish(self, epoch: int, target: int, buckets: Iterable[tuple[int, int]]) -> None:
        """Note that a target rank has read some buckets, given by source rank and number."""
        async with self._changed:
            if epoch == self._epoch:
                self._finished.update((*bucket, target) for bucket in buckets)
                self._changed.notify_all()

    async def leave(self, epoch: int, target: int) -> None:
        """Note that a target rank reads no more."""
        async with self._changed:
            if epoch == self._epoch:
                self._left.add(target)
                self._changed.notify_all()

    async def _wait(self, epoch: int, is_done: Callable[[], bool]) -> str:
        def over() -> str:
            return "another attempt has begun" if epoch != self._epoch else "the transfer was given up" * self._stopped

        await self._changed.wait_for(lambda: over() or is_done())
        return over()
