# SPDX-License-Identifier: Apache-2.0
"""Slices without TPUs, for tests of code that runs on TPU slices. Ray detects them like real ones."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import ray
from ray.cluster_utils import Cluster

from fairlead_placement import extension

from ._pool import ClosesOnExit
from ._ray_private import no_announcement

__all__ = ["PretendSlices"]

# Ray declares a killed raylet dead within about a second. One that has just joined is not checked for two seconds: two
# early checks that fail on a busy machine would declare it dead.
_QUICK_DEATHS = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
    "health_check_timeout_ms": 5000,
}


class PretendSlices(ClosesOnExit):
    """A cluster on this machine: a head without TPUs, and hosts of slices that tests add and kill one by one.

    Each host is a raylet with the variables of a TPU VM, so Ray gives it the labels and resources of one. All hosts
    share one address. This process is attached to the cluster until `close()`.

        with PretendSlices() as slices:
            name = slices.add_slice(kind="v4-8", topology="2x2x1", workers=[0])
            with SlicePool("v4-8") as pool:
                assert pool.run(lambda x: x + 1, 41) == [42]
    """

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 200_000_000}
        with no_announcement():
            self._cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _QUICK_DEATHS})
        self._hosts: dict[tuple[str, int], Any] = {}
        self._named = 0
        ray.init(address=self._cluster.address, logging_level="error", log_to_driver=False)

    @property
    def address(self) -> str:
        """The address for `ray.init` of another driver."""
        return str(self._cluster.address)

    @property
    def head_pid(self) -> int:
        """The process id of Ray's head (`gcs_server`), for tests that stop or end it."""
        return int(self._cluster.head_node.all_processes["gcs_server"][0].process.pid)

    def add_host(
        self,
        name: str,
        worker: int,
        *,
        kind: str = "v4-16",
        topology: str = "2x2x2",
        chips: int = 4,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Start a host with TPU worker id `worker` in the slice `name`, wait until it has joined, and return its id.

        `kind` and `topology` are those of its slice, and `env` are more variables for its raylet. Raises a TimeoutError
        if it has not joined within 60 s.
        """
        detected = {"TPU_NAME": name, "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": kind}
        # `Cluster.add_node(env_vars=)` does not reach Ray's detection.
        with mock.patch.dict(os.environ, {**detected, "TPU_TOPOLOGY": topology, **(env or {})}):
            node = self._cluster.add_node(num_cpus=2, resources={"TPU": chips}, object_store_memory=100_000_000)
        self._hosts[name, worker] = node
        node_id: str = node.node_id
        # `Cluster.wait_for_nodes` would also wait for hosts that were killed.
        _wait_until(lambda: any(row["NodeID"] == node_id and row["Alive"] for row in ray.nodes()))
        return node_id

    def add_slice(self, name: str = "", *, workers: Sequence[int] = (1, 0), **options: Any) -> str:
        """Start the hosts of a slice, in the order given, and return its name, which is new if none is given.

        `options` are the further arguments of `add_host`, whose error this raises.
        """
        self._named += not name
        name = name or f"slice-{self._named}"
        for worker in workers:
            self.add_host(name, worker, **options)
        return name

    def node_id(self, name: str, worker: int) -> str:
        """Return Ray's id of a host; KeyError if there is no such host, as in `kill`."""
        return str(self._hosts[name, worker].node_id)

    def kill(self, name: str, worker: int) -> None:
        """Kill all processes of a host, as if its VM were gone. Ray notices after one or two seconds."""
        import psutil  # Ray depends on it.

        node = self._hosts.pop((name, worker))
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        # The raylet is stopped first, so that it cannot see its children die and report that.
        raylet.suspend()
        for process in (*raylet.children(recursive=True), raylet):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.worker_nodes.remove(node)
        node.kill_all_processes(check_alive=False, allow_graceful=False)

    def remove(self, name: str) -> None:
        """Kill all hosts of a slice, and wait until Ray has noticed; TimeoutError if it has not within 60 s."""
        gone = {key: self.node_id(*key) for key in self._hosts if key[0] == name}
        for key in gone:
            self.kill(*key)
        _wait_until(lambda: not {*gone.values()} & {row["NodeID"] for row in ray.nodes() if row["Alive"]})

    def names(self) -> list[str]:
        """Return the names of the slices with at least one host."""
        return sorted({name for name, _ in self._hosts})

    def close(self) -> None:
        """Detach from the cluster, and end it."""
        ray.shutdown()
        with no_announcement():
            self._cluster.shutdown()


def _wait_until(holds: Callable[[], object]) -> None:
    if not extension.wait_until(holds, time.monotonic() + 60.0):
        raise TimeoutError(f"{holds} did not hold within 60 s.")
