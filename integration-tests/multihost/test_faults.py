# SPDX-License-Identifier: Apache-2.0
"""Hosts that die and links that fail: who notices, who does not, and what is left."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from fairlead_placement import PlacementTimeoutError, RayVirtualCluster, ResourceInsufficientError
from fairlead_workergroup import RayWorkerGroup, WorkerFailureError

SPARE = {"spare": 1.0}


class Counter:
    def __init__(self):
        self.calls = 0

    def count(self):
        self.calls += 1
        return os.getpid(), self.calls


def counts(group):
    return group.get_all_worker_results(group.run_all_workers_single_data("count"))


def wait_until_dead(node_id):
    deadline = time.monotonic() + 30
    while any(row["NodeID"] == node_id and row["Alive"] for row in ray.nodes()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_killed_while_others_wait(hosts, start_spare):
    """What can no longer be had is refused, what others hold times out, what waits for nodes gets the next one."""

    def driver():
        def reserved(counts, **options):
            cluster = RayVirtualCluster(counts, use_gpus=False, **options)
            began = time.monotonic()
            cluster.reserve()
            return cluster, time.monotonic() - began

        yield
        on_spare = {"node_resource_constraints": [SPARE]}
        with (
            RayVirtualCluster([2, 2], use_gpus=False, name="ordinary"),
            RayVirtualCluster([1], use_gpus=False, name="spare", **on_spare),
            ThreadPoolExecutor() as pool,
        ):
            # A bundle is free on the spare host, and two hosts besides.
            refused = pool.submit(reserved, [2], reserve_timeout_s=60, **on_spare)
            patient = pool.submit(reserved, [2], reserve_timeout_s=60, wait_for_nodes_s=60, **on_spare)
            elsewhere = pool.submit(reserved, [2, 2, 2, 2], reserve_timeout_s=10)
            time.sleep(2)
            yield [waiter.done() for waiter in (refused, patient, elsewhere)]
            yield refused.exception(), elsewhere.exception()
            cluster, _ = patient.result()
            new = cluster.slots()[0].node_id
            yield {slot.node_ip for slot in cluster.slots()}
            cluster.shutdown()
        yield
        wait_until_dead(new)

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step() == [False, False, False]
        hosts.kill(lost)
        refused, elsewhere = driving.step()
        assert isinstance(refused, ResourceInsufficientError)
        assert "wait_for_nodes_s" in str(refused)
        assert isinstance(elsewhere, PlacementTimeoutError)
        assert {holder.name[:9] for holder in elsewhere.report.holders} >= {"ordinary-"}
        new = start_spare()
        assert driving.step() == {new.address}
        driving.step()
        hosts.kill(new)


def test_killed_in_use(hosts, start_spare):
    """Workers there are lost as node-lost; the others answer, and somebody else's reservation is not held up."""

    def driver():
        yield
        with (
            RayVirtualCluster([2, 2], use_gpus=False, node_resource_constraints=[{}, SPARE]) as cluster,
            RayWorkerGroup(cluster, Counter) as group,
        ):
            before = counts(group)
            yield [slot.node_ip for slot in cluster.slots()]
            wait_until_dead(cluster.slots()[2].node_id)
            with pytest.raises(WorkerFailureError) as caught:
                counts(group)
            assert {(one.kind, one.rank in (2, 3)) for one in caught.value.failures} == {("node-lost", True)}
            living = ray.get([group.workers[rank].count.remote() for rank in (0, 1)])
            assert [pid for pid, _ in living] == [pid for pid, _ in before[:2]]
            with RayVirtualCluster([2, 2, 2], use_gpus=False, reserve_timeout_s=5) as other:
                yield other.world_size()
        yield

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step()[2:] == [lost.address] * 2
        hosts.kill(lost)
        assert driving.step() == 6
        driving.step()


def test_a_lost_host_is_replaced(hosts, start_spare):
    """The lost logical node gets slots on a new host, once; the others keep theirs, and their workers."""

    def driver():
        yield
        with RayVirtualCluster([1, 2], use_gpus=False, node_resource_constraints=[{}, SPARE]) as cluster:
            kept, *lost = cluster.slots()
            with RayWorkerGroup([kept], Counter) as survivors:
                before = counts(survivors)
                yield [slot.node_ip for slot in lost]
                wait_until_dead(lost[0].node_id)
                new = cluster.replace_lost_nodes(60.0)
                assert cluster.replace_lost_nodes(60.0) == ()
                assert [slot.node_idx for slot in new] == [1, 1]
                assert {slot.placement_group.id for slot in new}.isdisjoint({slot.placement_group.id for slot in lost})
                assert [(slot.node_idx, slot.node_ip) for slot in cluster.slots()] == [
                    (slot.node_idx, slot.node_ip) for slot in (kept, *new)
                ]
                with RayWorkerGroup(new, Counter) as replacement:
                    assert [calls for _, calls in counts(replacement)] == [1, 1]
                assert counts(survivors) == [(before[0][0], 2)]
                yield [slot.node_ip for slot in new]
        yield
        wait_until_dead(new[0].node_id)

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step() == [lost.address] * 2
        hosts.kill(lost)
        driving.resume()  # it waits for a host that joins meanwhile
        new = start_spare()
        assert driving.answer() == [new.address] * 2
        driving.step()
        hosts.kill(new)


def test_link_cut(hosts):
    """A link that is down for 5 s, too short for the host to be declared dead, delays calls and loses nothing."""

    def driver():
        with RayVirtualCluster([1, 1, 1, 1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Counter) as group:
            before = counts(group)
            yield cluster.slots()[1].node_ip
            delayed = group.run_all_workers_single_data("count")
            _, pending = ray.wait(delayed, num_returns=4, timeout=5)
            yield [delayed.index(ref) for ref in pending]
            after = group.get_all_worker_results(delayed)
            assert after == [(pid, 2) for pid, _ in before]
            assert counts(group) == [(pid, 3) for pid, _ in before]
            yield all(row["Alive"] for row in ray.nodes() if row["NodeID"] in {s.node_id for s in cluster.slots()})
        yield

    with hosts.driver(driver) as driving:
        behind = hosts.host_at(driving.step())
        hosts.cut(behind)
        try:
            assert driving.step() == [1]
        finally:
            hosts.mend(behind)
        assert driving.step()
        driving.step()
