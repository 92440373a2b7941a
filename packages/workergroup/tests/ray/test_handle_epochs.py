# SPDX-License-Identifier: Apache-2.0
"""Calls of handles while the epoch of the group changes: each runs in one epoch, or raises an error that says where."""

import asyncio
import os
import sys
import time

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    RayWorkerGroup,
    StaleGroupError,
    current_worker,
)

from ..calling import Acting
from ..faults import (
    limit_waits_of_handles,
    publish_next_epoch,
)

pytestmark = pytest.mark.nightly


def epoch():
    return current_worker().group_epoch


class Worker:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.runs = 0

    def take(self, *values):
        self.runs += 1
        return self.rank, epoch()

    def count(self, most):
        self.runs += 1
        for _ in range(2):
            yield self.rank, epoch()

    def take_runs(self):
        runs, self.runs = self.runs, 0
        return runs

    async def take_soon(self, *values):
        self.runs += 1
        return self.rank, epoch()

    async def count_soon(self, most):
        self.runs += 1
        for _ in range(2):
            yield self.rank, epoch()

    async def wait_soon_for(self, gate):
        self.runs += 1
        while not os.path.exists(gate):
            await asyncio.sleep(0.01)


def set_epoch(worker, epoch):
    published = sys.modules["_fairlead_worker"]
    published.facts = {**published.facts, "epoch": epoch}


def begin_epoch(group, *views):
    """Begin an epoch of a group, on the workers of the views, as a restart does."""
    publish_next_epoch(group)
    for one in views or [group]:
        one.call(set_epoch, group.state().group_epoch).result()


@pytest.fixture(scope="module", params=[False, True], ids=["in-turn", "overlapping"])
def group(local_ray, request):
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Worker,
            sharding_annotations=NamedSharding.from_shape(dp=2, tp=2),
            async_communication=request.param,
        ) as made,
    ):
        yield made


@pytest.fixture
def rank_ahead(group, monkeypatch):
    """Let rank 1 be in a later epoch than the others and the publication."""
    limit_waits_of_handles(monkeypatch, 0.1)
    group.at(dp=0, tp=1).call(set_epoch, group.state().group_epoch + 1).result()
    group.call("take_runs").result()
    yield 1
    group.call(set_epoch, group.state().group_epoch).result()
    group.call("take_runs").result()


WAYS = ["result", "outcomes", "iteration", "await", "async iteration", "stream", "async stream"]


METHODS = {"take": False, "count": True, "take_soon": False, "count_soon": True}


def consume(call, *, is_generator):
    """Yield each way to take the results of a call."""

    async def iterate():
        return [one async for one in call]

    async def stream():
        return [one async for one in call.stream()]

    async def wait():
        return await call

    yield "result", call.result
    yield "outcomes", call.outcomes
    yield "iteration", lambda: list(call)
    yield "await", lambda: asyncio.run(wait())
    yield "async iteration", lambda: asyncio.run(iterate())
    if is_generator:
        yield "stream", lambda: list(call.stream())
        yield "async stream", lambda: asyncio.run(stream())


@pytest.mark.parametrize("way", WAYS)
def test_refused(group, way):
    """In whatever way its results are taken, a call that all workers refuse raises an error, and the next one runs."""
    handle = group.handle()
    for method, is_generator in METHODS.items():
        if "stream" in way and not is_generator:
            continue  # no call is made: only who takes its results waits for the publication of the next epoch
        group.call("take_runs").result()
        call = handle.call(method, Acting(lambda: begin_epoch(group)), timeout=60)
        ways = dict(consume(call, is_generator=is_generator))
        with pytest.raises(StaleGroupError, match="none of its workers has run it") as raised:
            ways[way]()
        assert (raised.value.ran, raised.value.refused) == ((), (0, 1, 2, 3))
        assert raised.value.epoch == group.state().group_epoch == call.group_epoch + 1
        assert group.call("take_runs").result() == [0] * 4
        assert handle.call("take").result() == [(rank, group.state().group_epoch) for rank in range(4)]


def test_mixed(group, rank_ahead):
    """If some workers run a call and some refuse it, every way to take its results raises an error with both lists."""
    for method, is_generator in METHODS.items():
        call = group.handle().call(method, 2)
        for way, take in consume(call, is_generator=is_generator):
            with pytest.raises(
                StaleGroupError, match=r"rank\(s\) 0, 2, 3 have run it or begun to, and rank\(s\) 1 "
            ) as raised:
                take()
            assert (raised.value.ran, raised.value.refused) == ((0, 2, 3), (1,)), way
            assert raised.value.epoch == group.state().group_epoch + 1
        assert group.call("take_runs").result() == [1, 0, 1, 1]


def test_map(group):
    """An item that its worker refuses ends a map with an error."""
    handle = group.handle()
    items = [1, Acting(lambda: begin_epoch(group)), 2]
    with pytest.raises(StaleGroupError, match="was planned for epoch"):
        list(handle.map("take", items))
    assert len(list(handle.map("take", [1, 2]))) == 2


def test_running(group, rank_ahead, gate):
    """Workers that run a call, and may wait for the one that refused it, are not waited for."""
    try:
        began = time.monotonic()
        with pytest.raises(StaleGroupError) as raised:
            group.handle().call("wait_soon_for", gate).result()
        assert time.monotonic() - began < 30
        assert (raised.value.ran, raised.value.refused) == ((0, 2, 3), (1,))
    finally:
        gate.touch()
