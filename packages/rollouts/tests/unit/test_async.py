# SPDX-License-Identifier: Apache-2.0
"""Coroutines that wait for room or groups: they wake at each change, and a cancelled one takes nothing."""

import asyncio

import pytest
from invariants import check

from fairlead_rollouts import AsyncLedger, Claim, OldWeightsError, Ref


@pytest.fixture
def make_waiting(make_ledger):
    """Return a maker of ledgers with groups of one, whose weights may not be old."""
    return lambda prompts=4, places=1, **options: AsyncLedger(
        make_ledger(prompts, **{"group_size": 1, "groups_per_version": places, "max_staleness": 0, **options})
    )


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def run(coroutine):
    asyncio.run(asyncio.wait_for(coroutine, 20))


def test_lease_waits_for_room(make_waiting):
    """A lease waits until a step has been trained, or says that the trainer has left its weights behind."""
    waiting = make_waiting()

    async def job():
        [first] = await waiting.lease(2)
        later = asyncio.create_task(waiting.lease(2))
        old = asyncio.create_task(waiting.lease(2, serving_version=0))
        await settle()
        waiting.ledger.finish(first, 0, Ref("a"))
        assert isinstance(await waiting.claim(1, 1), Claim)
        await settle()
        assert not later.done()
        waiting.ledger.advance(1, trained=1)
        assert [lease.prompt_id for lease in await later] == [1]
        with pytest.raises(OldWeightsError, match="Load newer weights") as caught:
            await old
        assert (caught.value.serving_version, caught.value.oldest, caught.value.version) == (0, 1, 1)

    run(job())


def test_timeouts(make_waiting):
    """After the timeout a lease is empty, and a claim is a shortage. A wait does not use up the deadline of a lease."""
    waiting = make_waiting()

    async def job():
        assert (await waiting.claim(1, 1, timeout_s=0.01)).reason == "not_enough"
        [first] = await waiting.lease(1, deadline=100.0)
        assert await waiting.lease(1, timeout_s=0.01) == []
        later = asyncio.create_task(waiting.lease(1, deadline=100.0))
        await asyncio.sleep(0.1)
        waiting.ledger.cancel(first)
        [lease] = await later
        assert waiting.ledger.expire(100.05) == []
        assert waiting.ledger.expire(200.0) == [lease]

    run(job())


@pytest.mark.parametrize("turns", range(6))
def test_cancelled_at_every_await(make_waiting, turns):
    """A coroutine that is cancelled at any moment has either returned its groups or taken nothing."""
    waiting = make_waiting()

    async def job():
        [first] = await waiting.lease(1)
        tasks = [asyncio.create_task(waiting.lease(1)), asyncio.create_task(waiting.claim(1, 1))]
        for turn in range(6):
            if turn == turns:
                for task in tasks:
                    task.cancel()
            if turn == 2:
                waiting.ledger.finish(first, 0, Ref("a"))
                waiting.ledger.advance(0)
            await asyncio.sleep(0)
        lease, claim = await asyncio.gather(*tasks, return_exceptions=True)
        numbers = waiting.ledger.statistics()
        assert numbers.leased == isinstance(lease, list)
        assert numbers.claimed == isinstance(claim, Claim)
        check(waiting.ledger)

    run(job())


def test_a_claim_is_tried_when_enough_is_finished(make_waiting, monkeypatch):
    """A trainer that waits for many groups costs nothing until they are there, or until others have become too old."""
    waiting = make_waiting(100, places=8, on_stale="requeue")

    async def job():
        leases = await waiting.lease(8)
        calls, claim = [], waiting.ledger.claim
        monkeypatch.setattr(waiting.ledger, "claim", lambda *args, **rest: calls.append(args) or claim(*args, **rest))
        task = asyncio.create_task(waiting.claim(1, 8))
        for lease in leases[:4]:
            waiting.ledger.finish(lease, 0, Ref(lease.prompt_id))
            await settle()
        assert len(calls) == 1
        waiting.ledger.advance(1)
        await settle()
        assert waiting.ledger.statistics().requeued == {1: 4}
        assert len(calls) == 2
        for lease in [*leases[4:], *await waiting.lease(4)]:
            waiting.ledger.finish(lease, 0, Ref(lease.prompt_id), oldest_version=1)
            await settle()
        assert len((await task).groups) == 8
        assert len(calls) == 3

    run(job())


def test_a_claim_that_has_lost_a_group(make_waiting):
    """A step that has lost a group to a filter waits for one other group, not for a whole batch."""
    waiting = make_waiting(100, places=4)

    async def job():
        for lease in await waiting.lease(4):
            waiting.ledger.finish(lease, 0, Ref(lease.prompt_id))
        await waiting.claim(1, 4)
        waiting.ledger.drop([0], "no_signal")
        claim = asyncio.create_task(waiting.claim(1, 4))
        await settle()
        waiting.ledger.finish((await waiting.lease(4))[0], 0, Ref("another"))
        assert [group.prompt_id for group in (await claim).groups] == [1, 2, 3, 4]

    run(job())


def test_the_end_of_the_source(make_waiting):
    """When no group can come back, a lease is empty and a claim is exhausted; until then both wait."""
    waiting = make_waiting(1, places=2, max_staleness=1)

    async def job():
        [lease] = await waiting.lease(1)
        claim = asyncio.create_task(waiting.claim(1, 2))
        await settle()
        later = asyncio.create_task(waiting.lease(5))
        assert (await claim).reason == "exhausted"
        assert not later.done(), "the first group may fail and come back"
        waiting.ledger.fail(lease, reason="it broke")
        [again] = await later
        waiting.ledger.finish(again, 0, Ref("a"))
        await waiting.claim(1, 1)
        waiting.ledger.advance(1, trained=1)
        assert await waiting.lease(5) == []

    run(job())
