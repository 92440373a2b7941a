# SPDX-License-Identifier: Apache-2.0
"""Tests of groups that survive the loss of a host, and of the cleanup after a driver is killed."""

import os
import socket
import time
from pathlib import Path

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, Restart, Timeouts, WorkerFailureError, current_worker

SPARE = {"spare": 1.0}


class Member:
    """A worker that reports its location, and takes part in a collective."""

    def __init__(self):
        self.loaded = False

    def load(self):
        self.loaded = True

    def facts(self):
        worker = current_worker()
        return ray.util.get_node_ip_address(), worker.incarnation, self.loaded, os.environ["NODE_RANK"], os.getpid()

    def sum_of_ranks(self):
        import torch
        import torch.distributed as dist

        from fairlead_workergroup.torch import destroy, init_process_group

        init_process_group(timeout_s=200)
        value = torch.tensor([float(current_worker().rank)])
        dist.all_reduce(value)
        destroy()
        return int(value), os.environ["MASTER_ADDR"]

    def sleep(self, seconds):
        time.sleep(seconds)


def wait_until_dead(node_id):
    """Wait until Ray has marked a node dead."""
    deadline = time.monotonic() + 120
    while any(row["NodeID"] == node_id and row["Alive"] for row in ray.nodes()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def call_until(timeout_s, group):
    """Call a group again and again: a worker answers until it notices that its raylet is gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        group.call("facts").result()


def test_lost_host(hosts, start_spare):
    """A call that still runs elsewhere raises the loss of a host, and only its ranks restart, on another host."""

    def driver():
        yield
        options = {"restart": Restart(on_failure=True, method="load"), "timeouts": Timeouts(start_s=300)}
        with (
            RayVirtualCluster([1, 2], use_gpus=False, node_resource_constraints=[{}, SPARE]) as cluster,
            RayWorkerGroup(cluster, Member, **options) as group,
        ):
            before = group.call("facts").result()
            yield [address for address, *_ in before]
            call = group.call("sleep", 600)
            wait_until_dead(cluster.slots()[1].node_id)
            with pytest.raises(WorkerFailureError) as caught:
                call.result()
            assert {failure.kind for failure in caught.value.failures} == {"node-lost"}
            call.cancel(force=True)  # Rank 0 still sleeps.
            yield
            after = group.call("facts").result()
            yield [address for address, *_ in after]
            assert [facts[1:4] for facts in after] == [(1, True, "0"), (1, True, "1"), (1, True, "1")]
            assert [row["node_id"] for row in group.worker_metadata] == [slot.node_id for slot in cluster.slots()]
            last = cluster.slots()[1].node_id
        yield
        wait_until_dead(last)

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step()[1:] == [lost.address] * 2
        hosts.kill(lost)
        driving.step()
        new = start_spare()
        assert driving.step()[1:] == [new.address] * 2
        driving.step()
        hosts.kill(new)


@pytest.mark.nightly
def test_collectives_after_master_host_is_lost(hosts, start_spare):
    """With scope "group", all ranks restart with a store on another host, and collectives work again.

    The test does not set a network interface.
    """

    def driver():
        yield
        # Rank 0 runs on the spare host, and so does the store.
        cluster = RayVirtualCluster([1, 1], use_gpus=False, node_resource_constraints=[SPARE, {}])
        options = {"restart": Restart(on_failure=True, scope="group"), "timeouts": Timeouts(start_s=300)}
        options["bundle_indices_list"] = [(0, [0]), (1, [0])]
        with cluster, RayWorkerGroup(cluster, Member, **options) as group:
            answers = group.call("sum_of_ranks", timeout=240).result()
            assert answers == [(1, group.master_address)] * 2
            yield group.master_address
            lost = next(slot.node_id for slot in cluster.slots() if slot.node_ip == group.master_address)
            wait_until_dead(lost)
            with pytest.raises(WorkerFailureError):
                call_until(60.0, group)
            yield
            again = group.call("sum_of_ranks", timeout=240).result()
            assert again == [(1, group.master_address)] * 2
            assert [facts[1] for facts in group.call("facts").result()] == [1, 1]
            yield group.master_address
            last = next(slot.node_id for slot in cluster.slots() if slot.node_ip == group.master_address)
        yield
        wait_until_dead(last)

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step() == lost.address
        hosts.kill(lost)
        driving.step()
        new = start_spare()
        assert driving.step() == new.address
        driving.step()
        hosts.kill(new)


@pytest.mark.nightly
def test_group_without_cluster_cannot_replace_slots(hosts, start_spare):
    """A group that was made from slots cannot replace them. The error says so, and the live worker still works."""

    def driver():
        yield
        with (
            RayVirtualCluster([1, 1], use_gpus=False, node_resource_constraints=[{}, SPARE]) as cluster,
            RayWorkerGroup(cluster.slots(), Member) as group,
        ):
            yield cluster.slots()[1].node_ip
            wait_until_dead(cluster.slots()[1].node_id)
            with pytest.raises(WorkerFailureError, match="so there is no cluster that could reserve others"):
                group.restart_failed_workers()
            assert group.at(worker=0).call("facts").result()[0][1] == 0
        yield

    with hosts.driver(driver) as driving:
        driving.step()
        lost = start_spare()
        assert driving.step() == lost.address
        hosts.kill(lost)
        driving.step()


def test_killed_driver(hosts, eventually):
    """After SIGKILL of a driver, its workers are gone, and another driver gets its reservations and ports."""

    def first():
        yield
        with RayVirtualCluster([2, 2, 2, 2], use_gpus=False, name="doomed") as cluster:
            group = RayWorkerGroup(cluster, Member, memory_limit="4GB")
            group.call("sleep", 600)
            yield [worker.pid for worker in group.get_worker_status()], (group.master_address, group.master_port)
            yield

    def second(address, port):
        deadline = time.monotonic() + 240
        with RayVirtualCluster([2, 2, 2, 2], use_gpus=False, name="next", reserve_timeout_s=240) as cluster:
            there = next(slot for slot in cluster.slots() if slot.node_ip == address)

            def bound():
                with socket.socket() as ours:
                    try:
                        ours.bind((address, port))
                    except OSError:
                        return False
                return True

            from fairlead_placement.extension import run_on_nodes

            while not run_on_nodes(bound, {there.node_id: ()})[there.node_id]:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            with RayWorkerGroup(cluster, Member) as group:
                return len(group.call("facts").result())

    doomed = hosts.driver(first)
    try:
        doomed.step()
        pids, master = doomed.step()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        doomed.close()
    assert hosts.drive(second, *master) == 8
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)
