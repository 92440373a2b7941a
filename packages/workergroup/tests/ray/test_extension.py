# SPDX-License-Identifier: Apache-2.0
"""What packages that are built on groups of workers use."""

import asyncio
import gc
import os
import time
import weakref

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    RayWorkerBuilder,
    RayWorkerGroup,
    WorkerFailureError,
    WorkerGroupError,
)
from fairlead_workergroup.extension import Site
from fairlead_workergroup.testing import kill

SLOTS = 2
pytestmark = pytest.mark.usefixtures("local_ray")


def wait_for(worker, gate):
    while not os.path.exists(gate):
        time.sleep(0.01)


class Worker:
    def __init__(self):
        self.running, self.most = 0, 0

    def value(self):
        return 7


class Overlapping(Worker):
    async def work(self, seconds):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1

    async def work_until(self, gate):
        self.running += 1
        while not os.path.exists(gate):
            await asyncio.sleep(0.01)
        self.running -= 1

    async def items(self, count):
        for number in range(count):
            self.running += 1
            await asyncio.sleep(0.01)
            self.running -= 1
            yield number


def send(site, function, *args, ranks=None, **options):
    members = site.state().members
    chosen = [one for one in members if ranks is None or one.rank in ranks]
    return site.send("a function", ray.cloudpickle.dumps(function), dict.fromkeys(chosen, args), **options)


def fail(worker):
    raise ArithmeticError("broken")


def test_functions_and_replies(gate, wait_until_running):
    """A function gets the user's instance; replies are values, the worker's own errors, losses, or late."""
    with RayVirtualCluster([3], use_gpus=False) as cluster:
        group = RayWorkerGroup(cluster, RayWorkerBuilder(Worker))
        site = Site(group)
        before = site.state()
        for options in ({}, {"alone_s": 60.0}):
            replies = site.collect(send(site, lambda worker, x: worker.value() + x, 3, **options), 60)
            assert {rank: reply.value for rank, reply in replies.items()} == dict.fromkeys(range(3), 10)
            assert [reply.error for reply in replies.values()] == [None] * 3
        (failed,) = site.collect(send(site, fail, ranks=[1]), 30).values()
        assert isinstance(failed.error, ArithmeticError)
        assert failed.rank == 1

        requests = send(site, wait_for, gate, ranks=[2])
        wait_until_running(group, "<function>", 2)
        (late,) = site.collect(requests, 0.2).values()
        assert [(worker.rank, worker.method) for worker in late.error.late] == [(2, "<function>")]
        queued = send(site, lambda worker: setattr(worker, "seen", True), ranks=[2])
        time.sleep(0.3)  # long enough to reach the worker; the rest is right in any case
        site.cancel(queued)
        gate.touch()
        (checked,) = site.collect(send(site, lambda worker: hasattr(worker, "seen"), ranks=[2]), 60).values()
        assert checked.value is False

        kill(group, 0)
        replies = site.collect(send(site, lambda worker: 1), 30, all_of_them=True)
        assert [(failure.rank, failure.kind) for failure in replies[0].error.failures] == [(0, "killed")]
        assert (replies[1].error, replies[2].error) == (None, None)
        after = site.state()
        assert after.version > before.version
        assert after.members[0].lost is not None
        with pytest.raises(WorkerFailureError):
            group.call("value")
        group.shutdown()
        with pytest.raises(WorkerGroupError, match="has been shut down"):
            site.state()


@pytest.mark.filterwarnings("ignore:.*dropped without shutdown:ResourceWarning")
def test_site_of_a_dropped_group(shared_cluster):
    """A site does not keep its group alive."""
    group = RayWorkerGroup(shared_cluster, Worker, [1])
    site, dropped = Site(group), weakref.ref(group)
    assert site.state().members[0].rank == 0
    del group
    gc.collect()
    assert dropped() is None


def test_function_that_has_an_asyncio_worker_for_itself(gate, wait_until_running):
    """Methods that run end first, later ones wait; one that takes too long keeps the function from running."""

    async def alone(worker):
        seen = worker.running
        await asyncio.sleep(0.1)
        return seen, worker.running

    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Overlapping), async_communication=True) as group,
    ):
        site = Site(group)
        calls = [group.call("work", 0.05) for _ in range(20)]
        calls.append(group.call("items", 20))
        requests = [send(site, alone, alone_s=60.0) for _ in range(3)]
        calls += [group.call("work", 0.05) for _ in range(20)]
        for request in requests:
            assert site.collect(request, 60)[0].value == (0, 0)
        for call in calls:
            call.result(timeout=60)
        assert group.call(lambda worker: worker.most, collect=()).result() > 1

        slow = group.call("work_until", gate)
        wait_until_running(group, "work_until", 0)
        (reply,) = site.collect(send(site, alone, alone_s=0.1), 60).values()
        assert isinstance(reply.error, TimeoutError)
        assert "1 methods were still running" in str(reply.error)
        gate.touch()
        slow.result()
        assert site.collect(send(site, fail, alone_s=60.0), 60)[0].error.args == ("broken",)
        assert group.call("value").result() == [7]


class Refused(WorkerGroupError):
    pass


def test_check_calls(shared_cluster, puts, requests):
    """A package refuses calls of some ranks, before they are stored or sent, until it ends that."""
    refused, asked = {1}, []

    def check(method, ranks):
        asked.append((method, list(ranks)))
        if refused.intersection(ranks):
            raise Refused(f"rank(s) {sorted(refused.intersection(ranks))} must not run {method!r}")

    with RayWorkerGroup(shared_cluster, Worker, [2]) as group:
        end = Site(group).check_calls(check)
        puts.clear()
        with pytest.raises(Refused, match="must not run 'value'"):
            group.call("value")
        with pytest.raises(Refused):
            group.run_all_workers_single_data("value")
        assert (puts, requests) == ([], [])
        assert group.get_all_worker_results([group.run_single_worker_single_data("value", 0)]) == [7]
        refused.clear()
        assert group.call("value").result() == [7, 7]
        assert asked[-2:] == [("value", [0, 1])] * 2  # before it was stored, and when it was sent
        refused.add(0)
        end()
        end()
        assert group.call("value").result() == [7, 7]
