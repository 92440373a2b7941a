# SPDX-License-Identifier: Apache-2.0
"""Coroutines that wait for room or groups: they wake at each change, and a cancelled one takes nothing."""

import asyncio

import pytest
from invariants import check

from fairlead_rollouts import AsyncLedger, Claim, OldWeightsError, Ref


@pytest.fixture
def waiting(make_ledger):
    return AsyncLedger(make_ledger(4, group_size=1, groups_per_version=1, max_staleness=0))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_lease_waits_for_room(waiting):
    """A lease waits until a step has been trained."""

    async def run():
        [first] = await waiting.lease(2)
        later = asyncio.create_task(waiting.lease(2))
        await settle()
        assert not later.done()
        waiting.ledger.finish(first, 0, Ref("a"))
        assert isinstance(await waiting.claim(1, 1), Claim)
        await settle()
        assert not later.done()
        waiting.ledger.advance(1, trained=1)
        assert [lease.prompt_id for lease in await later] == [1]

    asyncio.run(run())


def test_weights_that_become_too_old(waiting):
    """A lease for weights that the trainer leaves behind in the wait says which ones it needs, and takes nothing."""

    async def run():
        [first] = await waiting.lease(1, serving_version=0)
        later = asyncio.create_task(waiting.lease(1, serving_version=0))
        await settle()
        waiting.ledger.finish(first, 0, Ref("a"))
        await waiting.claim(1, 1)
        waiting.ledger.advance(1, trained=1)
        with pytest.raises(OldWeightsError, match="Load newer weights") as caught:
            await later
        assert (caught.value.serving_version, caught.value.oldest, caught.value.version) == (0, 1, 1)
        assert len(await waiting.lease(1, serving_version=1)) == 1

    asyncio.run(run())


def test_timeouts(waiting):
    """After the timeout a lease is empty, and a claim is a shortage."""

    async def run():
        assert (await waiting.claim(1, 1, timeout_s=0.01)).reason == "not_enough"
        assert len(await waiting.lease(1)) == 1
        assert await waiting.lease(1, timeout_s=0.01) == []

    asyncio.run(run())


def test_a_cancelled_wait_takes_nothing(waiting):
    """After the cancellation of waiting coroutines, everything can be leased and claimed by others."""

    async def run():
        [lease] = await waiting.lease(1)
        tasks = [asyncio.create_task(waiting.lease(1)), asyncio.create_task(waiting.claim(1, 1))]
        await settle()
        for task in tasks:
            task.cancel()
        waiting.ledger.finish(lease, 0, Ref("a"))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        assert waiting.ledger.state(0) == "finished"
        check(waiting.ledger)
        assert isinstance(await waiting.claim(1, 1), Claim)

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(6))
def test_cancelled_at_every_await(waiting, turns):
    """A coroutine that is cancelled at any moment has either returned its leases or leased nothing."""

    async def run():
        [first] = await waiting.lease(1)
        task = asyncio.create_task(waiting.lease(1))
        for turn in range(6):
            if turn == turns:
                task.cancel()
            if turn == 2:
                waiting.ledger.cancel(first)
            await asyncio.sleep(0)
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        leased = waiting.ledger.statistics().leased
        assert leased == (0 if isinstance(outcome, asyncio.CancelledError) else 1)

    asyncio.run(run())


def count_calls(ledger, name, monkeypatch):
    """Return a list that gets an entry for each call of a method."""
    calls, method = [], getattr(ledger, name)
    monkeypatch.setattr(ledger, name, lambda *args, **options: calls.append(args) or method(*args, **options))
    return calls


def test_one_of_many_tries_to_lease(make_ledger, monkeypatch):
    """A change costs one attempt, however many wait, and who waits longest gets the room."""
    waiting = AsyncLedger(make_ledger(100, group_size=1, groups_per_version=4, max_staleness=0))

    async def run():
        leases = await waiting.lease(4)
        tasks = [asyncio.create_task(waiting.lease(1)) for _ in range(50)]
        await settle()
        calls = count_calls(waiting.ledger, "lease", monkeypatch)
        for lease in leases:
            waiting.ledger.cancel(lease)
            await settle()
        assert [task.done() for task in tasks] == [True] * 4 + [False] * 46
        assert len(calls) <= 2 * 4
        tasks[4].cancel()
        waiting.ledger.cancel(tasks[0].result()[0])
        await settle()
        assert tasks[5].done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_claim_is_tried_when_enough_is_finished(make_ledger, monkeypatch):
    """A trainer that waits for many groups costs nothing until they are there, or until others have become too old."""
    waiting = AsyncLedger(make_ledger(100, group_size=1, groups_per_version=8, max_staleness=0, on_stale="requeue"))

    async def run():
        leases = await waiting.lease(8)
        calls = count_calls(waiting.ledger, "claim", monkeypatch)
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

    asyncio.run(run())


def test_the_end_of_the_source(make_ledger):
    """When no group can come back, a lease is empty and a claim is exhausted; until then both wait."""

    async def run():
        waiting = AsyncLedger(make_ledger(1, group_size=1, groups_per_version=2, max_staleness=1))
        [lease] = await waiting.lease(5)
        later = asyncio.create_task(waiting.lease(5))
        await settle()
        assert not later.done(), "the first group may fail and come back"
        waiting.ledger.fail(lease, reason="it broke")
        [again] = await later
        waiting.ledger.finish(again, 0, Ref("a"))
        assert (await waiting.claim(1, 2)).reason == "exhausted"
        await waiting.claim(1, 1)
        waiting.ledger.advance(1, trained=1)
        assert await waiting.lease(5) == []

    asyncio.run(run())


def test_the_end_of_the_source_wakes_a_claim(make_ledger):
    """A claim that waits for more groups learns that the source has ended, although no group changes then."""

    async def run():
        waiting = AsyncLedger(make_ledger(1, group_size=1, groups_per_version=2, max_staleness=1))
        [lease] = await waiting.lease(1)
        claim = asyncio.create_task(waiting.claim(1, 2))
        waiting.ledger.finish(lease, 0, Ref("a"))
        await settle()
        assert not claim.done()
        more = asyncio.create_task(waiting.lease(1))
        assert (await asyncio.wait_for(claim, 10)).reason == "exhausted"
        more.cancel()

    asyncio.run(run())


def test_a_wait_does_not_use_up_the_deadline(waiting):
    """Generation has the same time, however long its lease has waited for room."""

    async def run():
        [first] = await waiting.lease(1, deadline=100.0)
        later = asyncio.create_task(waiting.lease(1, deadline=100.0))
        await asyncio.sleep(0.1)
        waiting.ledger.cancel(first)
        [lease] = await later
        assert waiting.ledger.expire(100.05) == []
        assert waiting.ledger.expire(200.0) == [lease]

    asyncio.run(run())
