# SPDX-License-Identifier: Apache-2.0
"""Waiting for room and for groups on an event loop."""

import asyncio

from ._ledger import Ledger
from ._model import Claim, Lease, Shortage

__all__ = ["AsyncLedger"]


class AsyncLedger:
    """Wait for room and for finished groups, on the event loop that calls the ledger.

    A coroutine that is cancelled leaves nothing leased and nothing claimed. Call all other methods on `ledger` itself,
    on the same event loop: each change wakes the coroutines that wait.

    Attributes:
        ledger: the ledger.

    >>> import asyncio
    >>> async def run(ledger):
    ...     waiting = asyncio.create_task(AsyncLedger(ledger).claim(step=1, count=1))
    ...     await asyncio.sleep(0)
    ...     ledger.finish(ledger.lease(1)[0], 0, Ref("a"))
    ...     return (await waiting).groups[0].prompt_id
    >>> asyncio.run(run(Ledger(LedgerConfig(group_size=1, groups_per_version=1, max_staleness=0), ["a"])))
    0
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._changed = asyncio.Event()
        # Held by the one coroutine that tries again to lease: thousands may wait, and room is for a few.
        self._turn = asyncio.Lock()
        ledger._book.callbacks.subscribers.append(self._wake)  # noqa: SLF001  of this package

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def lease(
        self,
        count: int,
        *,
        serving_version: int | None = None,
        deadline: float | None = None,
        timeout_s: float | None = None,
    ) -> list[Lease]:
        """Lease up to `count` groups, at least one, as in `Ledger.lease`.

        The seconds of the wait are added to the deadline, so that generation has the same time after a long wait.

        Returns:
            `[]` after the timeout, or when the source has ended and no group can come back.

        Raises:
            OldWeightsError: the trainer has advanced too far past `serving_version`, before the call or in the wait.
        """
        ledger, loop = self.ledger, asyncio.get_running_loop()
        if (leases := ledger.lease(count, serving_version=serving_version, deadline=deadline)) or ledger.exhausted:
            return leases
        began = loop.time()

        def lease() -> list[Lease]:
            later = None if deadline is None else deadline + loop.time() - began
            return ledger.lease(count, serving_version=serving_version, deadline=later)

        try:
            async with asyncio.timeout(timeout_s) as limit, self._turn:
                while not (leases := lease()) and not ledger.exhausted:
                    await self._changed.wait()
        except TimeoutError:
            if not limit.expired():
                raise
        return leases

    async def claim(
        self, step: int, count: int, *, minimum: int | None = None, timeout_s: float | None = None
    ) -> Claim | Shortage:
        """Claim groups for a step, as in `Ledger.claim`.

        Returns:
            A `Shortage` after the timeout, or if too few groups can ever come.
        """
        ledger, book = self.ledger, self.ledger._book  # noqa: SLF001  of this package
        finished = book.by_state["finished"]
        claim = ledger.claim(step, count, minimum=minimum)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while isinstance(claim, Shortage) and claim.reason != "exhausted":
                    # The version of a claim, which its place decides, says which groups are too old.
                    place, enough = (book.version, book.ahead), len(finished) + claim.need - claim.have
                    await self._changed.wait()
                    # A claim looks at all open groups, and a trainer may wait for thousands of them.
                    while len(finished) < enough and place == (book.version, book.ahead) and not book.source_ended:
                        await self._changed.wait()
                    claim = ledger.claim(step, count, minimum=minimum)
        except TimeoutError:
            if not limit.expired():
                raise
        return claim
