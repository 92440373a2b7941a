# SPDX-License-Identifier: Apache-2.0
"""Workers that Ray's own memory monitor ends are reported as out of memory too."""

import time

import psutil
import pytest
import ray

from fairlead_placement import RayVirtualCluster, lease_ports
from fairlead_placement.testing import assert_no_leaks
from fairlead_workergroup import RayWorkerGroup, Restart, WorkerFailureError

pytestmark = pytest.mark.nightly

GB = 10**9
# Enough that what else runs on the machine does not pass the threshold meanwhile.
MARGIN, TAKEN, STEP = 2 * GB, 4 * GB, 64 * 10**6


class Worker:
    def rank(self):
        return ray.get_runtime_context().get_actor_name()

    def take(self, size):
        self.blocks = [b"x" * STEP for _ in range(size // STEP)]
        time.sleep(1000)  # it is ended here at the latest, however slow the machine is


def test_kill_by_the_monitor(monkeypatch):
    """The kind is "out-of-memory", from the type of Ray's error, and the group restarts the worker."""
    memory = psutil.virtual_memory()
    if memory.available < 2 * TAKEN:
        pytest.skip(f"needs {2 * TAKEN / GB:g} GB of free memory, there are {memory.available / GB:.1f}")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    used = memory.total - memory.available
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _system_config={"memory_usage_threshold": (used + MARGIN) / memory.total, "memory_monitor_refresh_ms": 100},
    )
    try:
        with (
            assert_no_leaks(),
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Worker, restart=Restart(on_failure=True)) as group,
        ):
            with pytest.raises(WorkerFailureError) as caught:
                group.at(worker=1).call("take", TAKEN).result(timeout=120)
            assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "out-of-memory")]
            # Ray ends what started last as well, the agent of the node: there is another when it is needed.
            lease_ports(cluster.slots()[:1])[0][0].release()
            assert len(group.call("rank").result()) == 2
    finally:
        ray.shutdown()
