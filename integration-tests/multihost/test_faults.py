# SPDX-License-Identifier: Apache-2.0
"""Tests of reservations and worker groups when hosts die and links fail."""

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


def count_calls(group):
    return group.get_all_worker_results(group.run_all_workers_single_data("count"))


def wait_until_dead(node_id):
    deadline = time.monotonic() + 120
    while any(row["NodeID"] == node_id and row["Alive"] for row in ray.nodes()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.nightly
def test_host_dies_while_reservations_wait(hosts, start_spare):
    """When a host dies, the waiting reservations fail, time out or use the next host.

    A reservation that the cluster can no longer satisfy fails. A reservation of resources that others hold times out.
    A reservation with `wait_for_nodes_s` gets slots on the next host.
    """

    def driver():
        def reserve(bundle_counts, **options):
            cluster = RayVirtualCluster(bundle_counts, use_gpus=False, **options)
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
            # One bundle on the spare host and two other hosts are free.
            refused = pool.submit(reserve, [2], reserve_timeout_s=300, **on_spare)
            patient = pool.submit(reserve, [2], reserve_timeout_s=300, wait_for_nodes_s=300, **on_spare)
            elsewhere = pool.submit(reserve, [2, 2, 2, 2], reserve_timeout_s=10)
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


def test_host_with_workers_dies(hosts, start_spare):
    """The workers of a dead host fail as node-lost. Other workers and other reservations are not affected."""

    def driver():
        yield
        with (
            RayVirtualCluster([2, 2], use_gpus=False, node_resource_constraints=[{}, SPARE]) as cluster,
            RayWorkerGroup(cluster, Counter) as group,
        ):
            before = count_calls(group)
            yield [slot.node_ip for slot in cluster.slots()]
            wait_until_dead(cluster.slots()[2].node_id)
            with pytest.raises(WorkerFailureError) as caught:
                count_calls(group)
            assert {(one.kind, one.rank in (2, 3)) for one in caught.value.failures} == {("node-lost", True)}
            living = ray.get([group.workers[rank].count.remote() for rank in (0, 1)])
            assert [pid for pid, _ in living] == [pid for pid, _ in before[:2]]
            with RayVirtualCluster([2, 2, 2], use_gpus=False, reserve_timeout_s=60) as other:
                yield other.world_size()
        yield

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step()[2:] == [lost.address] * 2
        hosts.kill(lost)
        assert driving.step() == 6
        driving.step()


@pytest.mark.nightly
def test_lost_host_is_replaced(hosts, start_spare):
    """A lost logical node is replaced once by slots on a new host. Other nodes keep their slots and workers."""

    def driver():
        yield
        with RayVirtualCluster([1, 2], use_gpus=False, node_resource_constraints=[{}, SPARE]) as cluster:
            kept, *lost = cluster.slots()
            with RayWorkerGroup([kept], Counter) as survivors:
                before = count_calls(survivors)
                yield [slot.node_ip for slot in lost]
                wait_until_dead(lost[0].node_id)
                new = cluster.replace_lost_nodes(300.0)
                assert cluster.replace_lost_nodes(300.0) == ()
                assert [slot.node_idx for slot in new] == [1, 1]
                assert {slot.placement_group.id for slot in new}.isdisjoint({slot.placement_group.id for slot in lost})
                assert [(slot.node_idx, slot.node_ip) for slot in cluster.slots()] == [
                    (slot.node_idx, slot.node_ip) for slot in (kept, *new)
                ]
                with RayWorkerGroup(new, Counter) as replacement:
                    assert [calls for _, calls in count_calls(replacement)] == [1, 1]
                assert count_calls(survivors) == [(before[0][0], 2)]
                yield [slot.node_ip for slot in new]
        yield
        wait_until_dead(new[0].node_id)

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step() == [lost.address] * 2
        hosts.kill(lost)
        driving.resume()  # The driver waits for the host that joins next.
        new = start_spare()
        assert driving.receive() == [new.address] * 2
        driving.step()
        hosts.kill(new)


def cut_link(hosts, driver):
    """Cut the link of the host that a driver names until it has seen that rank 1 is late; return what it finds then."""
    with hosts.driver(driver) as driving:
        behind = hosts.host_at(driving.step())
        hosts.cut(behind)
        try:
            assert driving.step() == [1]
        finally:
            hosts.restore_link(behind)
        found = driving.step()
        driving.step()
    return found


@pytest.mark.nightly
def test_link_cut(hosts):
    """A link that is down for 5 s delays calls and loses none, because Ray does not declare the host dead yet."""

    def driver():
        with RayVirtualCluster([1, 1, 1, 1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Counter) as group:
            before = count_calls(group)
            yield cluster.slots()[1].node_ip
            delayed = group.run_all_workers_single_data("count")
            others = [ref for rank, ref in enumerate(delayed) if rank != 1]
            ray.wait(others, num_returns=3, timeout=60)
            time.sleep(5)
            _, pending = ray.wait(delayed, num_returns=4, timeout=0)
            yield [delayed.index(ref) for ref in pending]
            after = group.get_all_worker_results(delayed)
            assert after == [(pid, 2) for pid, _ in before]
            assert count_calls(group) == [(pid, 3) for pid, _ in before]
            yield all(row["Alive"] for row in ray.nodes() if row["NodeID"] in {s.node_id for s in cluster.slots()})
        yield

    assert cut_link(hosts, driver)
