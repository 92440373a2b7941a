# SPDX-License-Identifier: Apache-2.0
"""A group whose Ray has been shut down: requests to it raise, and do not start another Ray."""

import asyncio
import threading
import time

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerGroupError, current_worker

from ..calling import wait_for


class Worker:
    def answer(self, number=1):
        return number

    def items(self):
        yield 1


@pytest.fixture(scope="module", autouse=True)
def last_ray():
    """End the Ray that a test may leave to the next one."""
    yield
    ray.shutdown()


def start():
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="warning")


@pytest.fixture
def ended():
    """A group, calls of it, and its cluster, of a Ray that is no more; without another one, there is nothing to end."""
    start()
    cluster = RayVirtualCluster([3], use_gpus=False)
    cluster.reserve()
    group, other = RayWorkerGroup(cluster, Worker, 2), RayWorkerGroup(cluster.slots()[2:], Worker)
    answered, streaming = group.call("answer"), group.call("items")
    classic = group.run_all_workers_single_data("answer")
    answered.result()
    ray.shutdown()
    assert other.shutdown()
    return cluster, group, answered, streaming, classic


def test_requests(ended):
    """Requests raise, whether or not another Ray runs; the shutdown of the group succeeds and affects neither."""
    cluster, group, answered, streaming, classic = ended
    for runs in (False, True):
        if runs:
            start()
        for ask in (
            lambda: group.call("answer"),
            lambda: group.run_all_workers_single_data("answer"),
            lambda: group.get_all_worker_results(classic),
            lambda: list(group.map("answer", [2, 3])),
            group.get_worker_status,
            group.detect_stuck_workers,
            group.restart_failed_workers,
            answered.result,
            answered.wait,
            answered.cancel,
            lambda: list(answered),
            lambda: list(streaming.stream()),
            lambda: asyncio.run(wait_for(answered)),
        ):
            with pytest.raises(WorkerGroupError, match="the Ray it was made on has been shut down; make a new group"):
                ask()
            assert ray.is_initialized() is runs
    assert repr(answered) == "Call('answer', 2 workers, 2 results)"
    assert group.shutdown(cleanup_method="answer")
    assert cluster.shutdown()
    assert ray.is_initialized()


class Slow:
    """A worker whose constructor waits if it joins a group, and says so."""

    def __init__(self, path):
        if current_worker().world_size > 1:
            path.touch()
            time.sleep(300)


@pytest.mark.nightly
def test_end_of_ray_during_a_resize(tmp_path, eventually):
    """A resize on another thread raises when Ray is shut down, although what it waits for never comes."""
    outcomes, path = [], tmp_path / "constructor"
    start()
    cluster = RayVirtualCluster([2], use_gpus=False)
    group = RayWorkerGroup(cluster, RayWorkerBuilder(Slow, path), workers_per_node=1)

    def resize():
        try:
            group.resize(worker=2)
        except WorkerGroupError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=resize)
    thread.start()
    assert eventually(path.exists)
    ray.shutdown()
    thread.join(30)
    assert [one.rpartition(": ")[2] for one in outcomes] == [
        "the Ray it was made on has been shut down; make a new group"
    ]
    assert group.shutdown()
