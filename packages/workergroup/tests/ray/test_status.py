# SPDX-License-Identifier: Apache-2.0
"""The status and the resource usage of workers, read on their nodes while they are busy, hang or are lost."""

import os
import time

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, WorkerFailureError, WorkerGroupError, report_progress
from fairlead_workergroup.testing import kill

from ..faults import (
    restarting,
    unreadable_record,
)
from ..hanging import hanging, take_memory


class Worker:
    def work(self, gate):
        """Wait until a file exists."""
        report_progress(step=7, message="half of it")
        while not os.path.exists(gate):
            time.sleep(0.01)

    def rank(self):
        return int(os.environ["RANK"])

    def answer(self, size):
        return bytes(size)


@pytest.fixture(scope="module")
def nodes(raylets):
    """Four nodes with two slots for two groups each; a test removes one of them."""
    quiet = {"logging_level": "error", "log_to_driver": False}
    with raylets({"num_cpus": 4}, [{"num_cpus": 4}] * 3, quick_deaths=True, **quiet) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(nodes):
    with RayVirtualCluster([2, 2, 2, 2], use_gpus=False, max_colocated_worker_groups=2) as made:
        yield made


@pytest.fixture(scope="module")
def group(cluster):
    """Eight workers on the four nodes."""
    with RayWorkerGroup(cluster, Worker, sharding_annotations=NamedSharding.from_shape(dp=4, tp=2)) as workers:
        assert [status.state for status in workers.get_worker_status()] == ["idle"] * 8  # every agent has started
        yield workers


def states(group, **options):
    return [status.state for status in group.get_worker_status(**options)]


def test_fields(group, gate, eventually):
    """A status has the worker's identity, its method and duration, and the last step and message, also when idle."""
    call = group.at(dp=2, tp=1).call("work", gate)

    def is_waiting() -> bool:  # The step alone could be that of an earlier test.
        status = group.get_worker_status()[5]
        return (status.method, status.step) == ("work", 7) and status.message == "half of it"

    assert eventually(is_waiting)
    status = group.get_worker_status()[5]
    assert (status.rank, status.name, status.coords) == (5, "Worker-2-1", {"dp": 2, "tp": 1})
    assert (status.method, status.step, status.message) == ("work", 7, "half of it")
    assert 0 <= status.since_progress_s <= status.running_s
    assert (status.node_id, status.incarnation, status.restarts) == (group.worker_metadata[5]["node_id"], 0, 0)
    assert status.pid == group.get_worker_status()[5].pid
    gate.touch()
    call.result()
    again = group.get_worker_status()[5]
    assert (again.state, again.method, again.running_s, again.step) == ("idle", None, 0.0, 7)
    assert again.calls == status.calls


def test_states(group):
    """A worker without progress is stuck; a worker in a restart is restarting (seam: the restart)."""
    with hanging(group, 0, "native-gil"), hanging(group, 3):
        time.sleep(0.2)
        assert states(group, stuck_after_s=0.1) == ["stuck", "idle", "idle", "stuck", *["idle"] * 4]
        assert states(group)[0] == "busy"
        with restarting(group, 2):
            status = group.get_worker_status()[2]
        assert (status.state, status.incarnation, status.method) == ("restarting", 0, None)


def test_usage(group):
    """The usage has CPU, memory and threads by rank, and shows additional memory of a worker."""
    before = group.get_resource_usage()
    assert [usage.rank for usage in before] == list(range(8))
    view = group.at(dp=1, tp=1)
    view.call(take_memory, 64 << 20).result()
    after = group.get_resource_usage()
    # On a busy machine, the kernel meanwhile takes some pages of files.
    assert 60 << 20 <= after[3].rss_bytes - before[3].rss_bytes < 80 << 20
    assert all(usage.num_threads > 1 and usage.cpu_percent >= 0 for usage in after)
    view.call(take_memory, 0).result()


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "1", None])
def test_bad_arguments(group, seconds):
    """Values that are not a positive number of seconds are refused."""
    with pytest.raises(ValueError, match=r"stuck_after_s must be a positive number of seconds, got"):
        group.get_worker_status(stuck_after_s=seconds)
    with pytest.raises(ValueError, match=r"timeout_s must be a positive number of seconds, got"):
        group.detect_stuck_workers(seconds)


def test_unreadable_record(group):
    """Only the worker of that record is unknown; the others of its node are not."""
    with unreadable_record(group.get_worker_status()[2].pid):
        assert states(group) == ["idle", "idle", "unknown", *["idle"] * 5]
    assert states(group) == ["idle"] * 8


def test_dead_worker(cluster):
    """A worker is dead as soon as its process has ended, and has no usage; a group that has ended has no status."""
    with RayWorkerGroup(cluster, Worker, workers_per_node=[1, 1, 0, 0]) as group:
        kill(group, 1)
        assert states(group) == ["idle", "dead"]
        assert group.worker_metadata[1]["state"] == "dead"
        assert [usage.rank for usage in group.get_resource_usage()] == [0]
    for ask in (group.get_worker_status, group.get_resource_usage, group.detect_stuck_workers):
        with pytest.raises(WorkerGroupError, match="has been shut down; make a new group"):
            ask()


def test_lost_node(nodes, group, eventually):
    """Its workers are dead as soon as Ray reports it, without a wait; results that were on the node are lost too."""
    answers = group.call("answer", 1_000_000)
    assert answers.wait(60)
    raylet = nodes.list_all_nodes()[-1]
    lost = [rank for rank, worker in enumerate(group.worker_metadata) if worker["node_id"] == raylet.node_id]
    nodes.remove_node(raylet, allow_graceful=False)
    assert eventually(lambda: not any(row["Alive"] for row in ray.nodes() if row["NodeID"] == raylet.node_id), 30)
    assert len(lost) == 2
    assert [rank for rank, state in enumerate(states(group)) if state == "dead"] == lost
    assert [usage.rank for usage in group.get_resource_usage()] == [rank for rank in range(8) if rank not in lost]
    with pytest.raises(WorkerFailureError) as caught:
        answers.result()
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(rank, "node-lost") for rank in lost]
    ray.shutdown()  # what the node held cannot be as it was before this test
