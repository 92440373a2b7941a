# SPDX-License-Identifier: Apache-2.0
"""Lost workers are restarted: the same ranks, the same slots, the same arguments."""

import asyncio
import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    RayWorkerBuilder,
    RayWorkerGroup,
    Restart,
    Shard,
    Timeouts,
    WorkerFailureError,
    WorkerGroupError,
)
from fairlead_workergroup.testing import kill

from ..calling import MB
from ..restarting import AXES, GRID, VALUE, Worker, die, is_restarting


class Configured:
    """Gets an argument of 8 MB that it was not given."""

    def __init__(self, block):
        self.block = block

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return {}, {}, {"block": np.ones(MB)}

    def total(self):
        return int(self.block.sum())


def make_lasting(cluster):
    builder = RayWorkerBuilder(Worker, VALUE)
    return RayWorkerGroup(cluster, builder, [2], sharding_annotations=AXES, restart=Restart(max_restarts=100))


def incarnations(group):
    return [state[1] for state in group.call("state").result()]


def test_restart_of_a_rank(lasting, puts):
    """The rank gets the same arguments, which are stored once, and a new process; other ranks do not change."""
    group, (first, second) = lasting, incarnations(lasting)
    pids = group.call("pid").result()
    die(group, 1)
    assert group.worker_metadata[1]["state"] == "dead"
    assert group.restart_failed_workers() == [1]
    assert group.worker_metadata[1]["state"] == "alive"
    port = str(group.master_port)
    assert group.call("state").result() == [(0, first, None, 20_000.0, port), (1, second + 1, None, 20_000.0, port)]
    assert puts == []
    now = group.call("pid").result()
    assert [now[rank] == pids[rank] for rank in range(2)] == [True, False]
    assert group.restart_failed_workers() == []


def test_arguments_of_earlier_starts(local_ray, eventually, store_used):
    """The values that `configure_worker` adds are stored for each start, and released when nothing uses them."""
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Configured) as group:
        used = store_used()  # with what earlier tests of this Ray may still hold
        assert used >= 8 * MB
        for _ in range(2):
            kill(group, 0)
            assert eventually(lambda: group.restart_failed_workers() == [0])  # once Ray knows
            assert group.call("total").result() == [MB]
        assert eventually(lambda: gc.collect() >= 0 and store_used() < used + MB), (used, store_used())


def test_death_that_no_call_reported(lasting, eventually):
    """`restart_failed_workers` finds dead workers through Ray."""
    group, before = lasting, incarnations(lasting)
    os.kill(group.call("pid").result()[1], signal.SIGKILL)
    restarted = []
    assert eventually(lambda: restarted.extend(group.restart_failed_workers()) or restarted, 60)
    assert restarted == [1]
    assert incarnations(group) == [before[0], before[1] + 1]


def test_restart_of_the_group(make_group):
    """With scope "group" all workers restart with a new master port, and all run `Restart.method`.

    No call runs while a rank is lost: `map` and views without that rank restart the group too.
    """
    group = make_group(restart=Restart(on_failure=True, scope="group", method="load"))
    port = group.master_port
    die(group, 1)
    assert group.restart_failed_workers() == [0, 1]
    assert group.master_port != port
    assert group.call("state").result() == [(rank, 1, 1, 20_000.0, str(group.master_port)) for rank in range(2)]
    with pytest.raises(WorkerFailureError, match="starts them again, and all others with them"):
        group.call("die", [1]).result()
    assert [state[1] for state in group.at(dp=0).call("state").result()] == [2]
    die(group, 1)
    assert next(group.map("state_of", [0]))[1] == 3
    assert incarnations(group) == [3] * 2


@pytest.mark.parametrize("scope", ["worker", "group"])
def test_map_after_a_loss(make_group, tmp_path, scope):
    """Other workers get the items of a worker that died; with scope "group" all workers restart and take part again."""
    group = make_group(restart=Restart(on_failure=True, scope=scope, max_restarts=1), enable_load_balancing=True)
    assert list(group.map("die_once", [(item, tmp_path / "died") for item in range(20)])) == list(range(20))
    incarnations = [state[1] for state in group.call("state").result()]
    assert sorted(incarnations) == ([0, 1] if scope == "worker" else [1] * 2)


@pytest.mark.parametrize("bare", [True, False])
def test_cluster_shut_down(local_ray, bare):
    """Calls and restarts report that the cluster is gone, instead of waiting for ever."""
    cluster = RayVirtualCluster([1], use_gpus=False)
    place = cluster.slots() if bare else cluster
    with RayWorkerGroup(place, Worker, restart=Restart(on_failure=True), timeouts=Timeouts(start_s=60)) as group:
        cluster.shutdown()
        call = group.call("pid")
        for asks in (call.result, lambda: group.call("pid"), group.restart_failed_workers):
            with pytest.raises(WorkerFailureError, match="The cluster of this group has been shut down") as caught:
                asks()
            assert "create a new group" in caught.value.remedy
            assert [failure.kind for failure in caught.value.failures] == ["shut-down"]


@pytest.mark.smoke
def test_restart_before_the_next_call(make_group):
    """With `on_failure` the call that meets the loss raises; the next one works, also a classic one."""
    group = make_group(axes=GRID, restart=Restart(on_failure=True, method="load"))
    with pytest.raises(WorkerFailureError, match="next call that needs these ranks starts them again"):
        group.call("die", [0, 3]).result()
    assert group.call("double", Shard([1, 2], "dp"), retries=1).result() == [2, 2, 4, 4]
    assert [state[1] for state in group.call("state").result()] == [1, 0, 0, 1]
    die(group, 1)
    assert group.get_all_worker_results(group.run_all_workers_single_data("double", 4)) == [8] * 4


@pytest.mark.smoke
def test_retries(make_group, puts, requests):
    """With `retries` the call is repeated on the lost ranks only, also if it is awaited or streams."""
    group = make_group(axes=GRID, restart=Restart(on_failure=True, method="load", max_restarts=5))
    big = np.ones(20_000)
    puts.clear()
    call = group.call("double", Shard([big, big], "dp"), die_at=[1], retries=1, collect="tp")
    assert [float(value[0]) for value in call.result()] == [2.0, 2.0]
    # The call, `Restart.method` of the rank that was started, and the call again.
    assert requests == [*["double"] * 4, "load", "double"]
    assert len(puts) == 1
    assert [state[1] for state in group.call("state").result()] == [0, 1, 0, 0]

    async def awaited():
        return await group.call("double", 3, die_at=[2], retries=2)

    assert asyncio.run(awaited()) == [6] * 4
    assert group.call("count", 3, die_at=[3], retries=1).result() == [[0, 1, 2]] * 4
    with pytest.raises(WorkerFailureError):
        group.call("double", 3, die_at=[0], until=9, retries=1).result()
    with pytest.raises(ValueError, match="mine"):
        group.call("raise_error", retries=3).result()


def test_death_and_the_errors_it_causes(lasting):
    """If a peer fails because a worker died, the call raises the death, even if the error of the peer arrives first."""
    group, before = lasting, incarnations(lasting)
    for again in range(2):
        pid = group.call("pid").result()[1]
        with pytest.raises(WorkerFailureError, match="rank 1"):
            group.call("fail_with", 1, pid).result()
        assert group.restart_failed_workers() == [1]
        assert incarnations(group) == [before[0], before[1] + again + 1]


@pytest.mark.parametrize("scope", ["worker", "group"])
def test_retries_with_two_waiting_threads(make_group, requests, scope):
    """A call whose result two threads wait for is repeated once, and uses one of its retries.

    With scope "group" all ranks repeat it, after all have been restarted.
    """
    group = make_group(restart=Restart(on_failure=True, scope=scope))
    call = group.call("double", 3, die_at=[1], retries=1)
    requests.clear()
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(call.result) for _ in range(2)]
        assert [result.result(timeout=120) for result in results] == [[6] * 2] * 2
    assert requests == ["double"] * (1 if scope == "worker" else 2)
    assert [state[1] for state in group.call("state").result()] == ([0, 1] if scope == "worker" else [1] * 2)


def test_loss_reported_by_a_worker(make_group, requests):
    """A worker that raises WorkerFailureError about workers of its own is not lost, and nothing is repeated."""
    group = make_group(restart=Restart(on_failure=True, scope="group"))
    call = group.call("raise_loss", retries=2)
    with pytest.raises(WorkerFailureError, match="of a group of mine"):
        call.result()
    assert group.call("state").result()[0][1] == 0
    assert requests == ["raise_loss"] * 2 + ["state"] * 2


def test_max_restarts(make_group):
    """The limit counts per rank with scope "worker"; at the limit the error says so, and nothing is started."""
    group = make_group(max_restarts=1)  # a keyword that stands for the field of `Restart`
    for rank in (0, 1):
        die(group, rank)
        assert group.restart_failed_workers() == [rank]
    die(group, 1)
    with pytest.raises(WorkerFailureError, match="rank 1 has been restarted max_restarts=1 times"):
        group.restart_failed_workers()
    with pytest.raises(WorkerFailureError, match="rank 1 has been restarted max_restarts=1 times"):
        group.call("pid")
    group = make_group(restart=Restart(max_restarts=0, scope="group", on_failure=True))
    die(group, 0)
    with pytest.raises(WorkerFailureError, match="the group has been restarted max_restarts=0 times"):
        group.call("pid")


def test_failed_restart(make_group):
    """The failure has kind "start-failed" and the reason; the restart can be repeated until max_restarts."""
    group = make_group(VALUE, [1], restart=Restart(max_restarts=2))
    die(group, 1)
    for _ in range(2):
        with pytest.raises(WorkerFailureError, match="cannot start a second time") as caught:
            group.restart_failed_workers()
        assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "start-failed")]
    with pytest.raises(WorkerFailureError, match="max_restarts=2"):
        group.restart_failed_workers()
    assert group.at(dp=0).call("double", 1).result() == [2]
    group = make_group(restart=Restart(method="fail_to_load"))
    die(group, 0)
    with pytest.raises(WorkerFailureError, match="no checkpoint"):
        group.restart_failed_workers()
    with pytest.raises(WorkerFailureError, match="rank 0"):
        group.call("pid")


def test_shutdown_during_a_restart(make_group, tmp_path, eventually):
    """A shutdown also ends the workers that another thread is starting, and no call restarts the group."""
    env_vars = {"GATE": str(tmp_path / "never")}
    group = make_group(restart=Restart(on_failure=True, method="load_when_open"), env_vars=env_vars)
    die(group, 1)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(group.call, "pid")
        assert eventually(lambda: is_restarting(group), 60)
        assert eventually((tmp_path / "never.1").exists, 60)  # the new process runs `Restart.method`
        group.shutdown()
        with pytest.raises((WorkerGroupError, WorkerFailureError)):
            call.result(timeout=60)
    assert group.workers == []
    with pytest.raises(WorkerGroupError, match="it has been shut down"):
        group.call("pid")


def test_time_of_on_restart(make_group):
    """`Restart.method` may take as long as a start; the timeout of calls does not apply."""
    group = make_group(restart=Restart(on_failure=True, method="slowly_load"), timeouts=Timeouts(call_s=0.5))
    die(group, 1)
    assert group.restart_failed_workers() == [1]


def test_bad_methods_and_retries(make_group, lasting):
    """An unknown restart method is refused with a list of methods; retries need a group that restarts workers."""
    with pytest.raises(AttributeError, match="Worker has no public method 'reload'"):
        make_group(restart=Restart(method="reload"))
    with pytest.raises(ValueError, match=r"needs a group with restart=Restart\(on_failure=True\)"):
        lasting.call("pid", retries=1)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="retries must be a whole number"):
            lasting.call("pid", retries=wrong)
