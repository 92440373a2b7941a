# SPDX-License-Identifier: Apache-2.0
"""Tests of `map`, which gives each item to one worker."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import CallTimeoutError, RayWorkerGroup, WorkerFailureError


class Worker:
    """A worker that records its items, and waits, fails or dies for some of them."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])

    def work(self, item):
        kind, number = item
        if kind == "wait for" or (kind == "wait in 0 for" and self.rank == 0):
            while not os.path.exists(number):
                time.sleep(0.01)
        if kind == "bad":
            raise ValueError(f"bad item {number}")
        if kind == "fatal" or (kind == "fatal to 1" and self.rank == 1):
            os._exit(1)
        return number, self.rank

    def done(self):
        return True

    def items(self, n):
        yield n


def made(size: int, **options) -> Iterator[RayWorkerGroup]:
    with RayVirtualCluster([size], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker, **options) as group:
        yield group


@pytest.fixture(scope="module")
def group(local_ray: None) -> Iterator[RayWorkerGroup]:
    """Yield four workers for the tests that leave them unchanged."""
    yield from made(4)


@pytest.mark.smoke
def test_round_robin_in_order(group):
    """By default item i goes to worker i modulo the number of workers, and results are in the order of the items."""
    assert list(group.map("work", [("easy", i) for i in range(10)])) == [(i, i % 4) for i in range(10)]


def test_least_loaded(group, gate):
    """The next item goes to the worker with the fewest items: a slow worker does not delay the others."""
    items = [("wait in 0 for", str(gate))] * 24
    results = group.map("work", items, strategy="least_loaded", max_in_flight=1, ordered=False)
    first = Counter(next(results)[1] for _ in range(23))
    assert set(first) == {1, 2, 3}
    gate.touch()
    assert [rank for _, rank in results] == [0]


@pytest.mark.smoke
def test_unordered(group, gate):
    """Unordered results arrive as they finish, and those of a slow worker later."""
    results = group.map("work", [("wait in 0 for", str(gate))] * 8, ordered=False)
    assert {next(results)[1] for _ in range(6)} == {1, 2, 3}
    gate.touch()
    assert [rank for _, rank in results] == [0, 0]


def test_items_are_taken_as_needed(group, requests):
    """An endless iterator works: only the items in flight are taken, and no worker is called before."""
    taken = []

    def endless():
        while True:
            taken.append(len(taken))
            yield ("easy", len(taken) - 1)

    results = group.map("work", endless(), max_in_flight=2)
    assert (taken, requests) == ([], [])
    assert [next(results)[0] for _ in range(20)] == list(range(20))
    assert len(taken) <= 20 + 4 * 2 + 1
    results.close()
    assert group.call("done").result() == [True] * 4


def test_a_slow_item_bounds_the_window(group, gate, eventually):
    """In order, finished items wait for the oldest item; their number is bounded."""
    taken = []

    def items():
        for i in range(1000):
            taken.append(i)
            yield ("wait for", str(gate)) if i == 0 else ("easy", i)

    results = group.map("work", items(), strategy="least_loaded", max_in_flight=1)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(next, results)
        assert eventually(lambda: len(taken) > 8, 60)
        assert not eventually(lambda: len(taken) > 8 * 4 + 4, 0.5)
        gate.touch()
        assert first.result(60)[0] == str(gate)
    results.close()


def test_an_error(group):
    """A worker's exception ends the map at its item, which a note names; the group still works."""
    results = group.map("work", [("easy", 0), ("bad", 1), ("easy", 2)])
    assert next(results) == (0, 0)
    with pytest.raises(ValueError, match="bad item 1") as caught:
        next(results)
    assert caught.value.__notes__[-1] == "item 1 of map('work')"
    assert group.call("done").result() == [True] * 4


def test_exceptions_as_results(group, gate, clock, wait_until_running):
    """With return_exceptions an item's error is its result, and the others continue."""
    results = list(group.map("work", [("easy", 0), ("bad", 1), ("easy", 2)], return_exceptions=True))
    assert [results[0], results[2]] == [(0, 0), (2, 2)]
    assert isinstance(results[1], ValueError)
    assert results[1].__notes__[-1] == "item 1 of map('work')"
    items = [("wait for", str(gate)), ("easy", 1)]
    results = group.map("work", items, return_exceptions=True, timeout=600, ordered=False)
    assert next(results) == (1, 1)
    wait_until_running(group, "work", 0)
    clock.skip(600)
    assert type(next(results)) is CallTimeoutError


def test_async_for(group, tmp_path):
    """In a coroutine the loop keeps running while workers process items; order and errors are as with `for`."""

    async def main():
        gate = tmp_path / "gate"
        easy = [("easy", i) for i in range(10)]
        assert [value async for value in group.map("work", easy)] == [(i, i % 4) for i in range(10)]
        unordered = [number async for number, _ in group.map("work", easy, ordered=False)]
        assert sorted(unordered) == list(range(10))
        waiting = anext(group.map("work", [("wait for", str(gate))], timeout=60))
        opened = asyncio.create_task(asyncio.to_thread(gate.touch))  # never done if the loop is blocked
        assert (await waiting)[0] == str(gate)
        await opened
        one = group.at(worker=slice(0, 1))
        mixed = one.map("work", [("easy", 0), ("bad", 1), ("easy", 2)], max_in_flight=1)
        assert await anext(mixed) == (0, 0)
        with pytest.raises(ValueError, match="bad item 1") as caught:
            await anext(mixed)
        assert caught.value.__notes__[-1] == "item 1 of map('work')"
        found = [type(one) async for one in group.map("work", [("bad", 0), ("easy", 1)], return_exceptions=True)]
        assert found == [ValueError, tuple]
        later = tmp_path / "later"
        rest = group.map("work", [("easy", 0), *[("wait for", str(later))] * 7], ordered=False)
        assert await anext(rest) == (0, 0)
        await rest.aclose()
        later.touch()

    asyncio.run(main())


def test_options_of_a_view(group, gate):
    """The timeout of `with_options` holds for each item; options without a meaning are refused by name."""
    with pytest.raises(CallTimeoutError):
        list(group.with_options(timeout=0.1).map("work", [("wait for", str(gate))]))
    gate.touch()
    assert list(group.with_options(timeout=0.01).map("work", [("easy", 0)], timeout=60)) == [(0, 0)]
    with pytest.raises(ValueError, match=r"the options \['retries', 'discard'\] of this view have no meaning"):
        group.with_options(discard=True, retries=1).map("work", [])


@pytest.mark.parametrize(
    ("method", "options", "error"),
    [
        ("nothing", {}, AttributeError),
        ("done", {}, TypeError),
        ("items", {}, TypeError),
        ("work", {"max_in_flight": 0}, ValueError),
        ("work", {"max_in_flight": 1.5}, ValueError),
        ("work", {"strategy": "fastest"}, ValueError),
        ("work", {"timeout": -1}, ValueError),
    ],
)
def test_bad_arguments(group, method, options, error):
    """Bad arguments are refused at once, not at the first item."""
    with pytest.raises(error):
        group.map(method, [1], **options)


def test_leaders_of_tied_groups(local_ray):
    """With tied groups, the first worker of each takes part."""
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, bundle_indices_list=[(0, [0, 1]), (0, [2])]) as group,
    ):
        assert {rank for _, rank in group.map("work", [("easy", i) for i in range(6)])} == {0, 2}


def test_a_dead_workers_items(local_ray):
    """With `move_items` the other workers take over, also later items; without it the loss is raised."""
    items = [("easy", 0), ("fatal to 1", 1), *(("easy", i) for i in range(2, 12))]
    for group in made(2):
        results = list(group.map("work", items, strategy="round_robin", move_items=True))
        assert [number for number, _ in results] == list(range(12))
        assert 1 not in {rank for _, rank in results}
        assert [number for number, _ in group.map("work", items, move_items=True)] == list(range(12))
    for group in made(2):
        results = list(group.map("work", items, return_exceptions=True))
        lost = [result for result in results if isinstance(result, WorkerFailureError)]
        assert (len(results), results[0], results[2][0]) == (12, (0, 0), 2)
        assert lost[0] is results[1]
    for group in made(2):
        with pytest.raises(WorkerFailureError, match="rank 1") as caught:
            list(group.map("work", items))
        assert caught.value.__notes__[-1] == "item 1 of map('work'); workers lost with it: 1"


@pytest.mark.nightly
def test_an_item_that_kills(local_ray):
    """An item that kills its workers is given up before it has killed all of them."""
    for group in made(4, enable_load_balancing=True, load_balancing_strategy="least_loaded"):
        with pytest.raises(WorkerFailureError) as caught:
            list(group.map("work", [("fatal", 0)]))
        assert caught.value.__notes__[-1].endswith("workers lost with it: 3")
        states = [status.state for status in group.get_worker_status()]
        assert len([state for state in states if state != "dead"]) == 1
