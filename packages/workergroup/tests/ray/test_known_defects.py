# SPDX-License-Identifier: Apache-2.0
"""Defects that the group once had: waits that outlived their deadlines, and restarts that looked like losses."""

import contextlib
import os
import signal
import threading
import time

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, StaleGroupError, WorkerFailureError

pytestmark = pytest.mark.nightly


class Worker:
    def rank(self, value=None):
        return int(os.environ["RANK"])


@pytest.fixture
def group(local_ray):
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, [2], sharding_annotations=NamedSharding.from_shape(dp=2)) as made,
    ):
        yield made


def test_deadline_of_a_resize_with_a_stopped_agent(group, agent_pids, stop_process):
    """`resize(timeout=...)` returns by its deadline, also if the agent that leases the port does not answer."""
    (agent,) = agent_pids()
    with stop_process(agent):
        began = time.monotonic()
        with contextlib.suppress(Exception):
            group.resize(dp=3, timeout=5)
        assert time.monotonic() - began < 7


def test_deadline_of_a_shutdown_without_a_raylet(raylets):
    """`shutdown(timeout=...)` returns by its deadline, also after the raylet of the workers was killed."""
    quiet = {"logging_level": "error", "log_to_driver": False}
    with raylets({"num_cpus": 0}, [{"num_cpus": 2}], **quiet) as nodes:
        reserved = RayVirtualCluster([2], use_gpus=False)
        group = RayWorkerGroup(reserved, Worker)
        (node,) = nodes.worker_nodes
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        began = time.monotonic()
        group.shutdown(timeout=8)
        assert time.monotonic() - began < 10


def test_handles_during_a_planned_restart(group):
    """A call of a handle while ranks move fails as one of another epoch: no worker is lost."""
    handle, errors, is_over = group.handle(), [], threading.Event()

    def run():
        while not is_over.is_set():
            try:
                handle.call("rank", timeout=60).result()
            except WorkerFailureError as error:
                errors.append(error)
            except StaleGroupError:
                continue

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    for _ in range(4):
        group.restart([0, 1], elsewhere=True)
    is_over.set()
    caller.join(90)
    assert errors == []
