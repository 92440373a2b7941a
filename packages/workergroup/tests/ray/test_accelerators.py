# SPDX-License-Identifier: Apache-2.0
"""Workers with accelerators of any kind, which a node only pretends to have."""

import os

import pytest
import ray

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_workergroup import RayWorkerGroup

# What a node pretends to have, and the variable that limits what a process sees of it.
VISIBLE = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    "HPU": "HABANA_VISIBLE_MODULES",
    "NPU": "ASCEND_RT_VISIBLE_DEVICES",
    "TPU": "TPU_VISIBLE_CHIPS",
    "neuron_cores": "NEURON_RT_VISIBLE_CORES",
}


class Worker:
    def devices(self):
        """Return the ids that Ray has assigned, by kind, and the variables that limit what the process sees."""
        assigned = ray.get_runtime_context().get_accelerator_ids()
        return {kind: ids for kind, ids in assigned.items() if ids}, dict(os.environ)

    def resources(self):
        return ray.get_runtime_context().get_assigned_resources()


@pytest.fixture(scope="module")
def node(raylets):
    resources = {kind: 4 for kind in VISIBLE if kind != "GPU"} | {"licence": 4, "accelerator_type:X1": 1}
    options = {"num_cpus": 8, "num_gpus": 4, "resources": resources}
    with raylets(options, logging_level="error", log_to_driver=False) as made:
        yield made


@pytest.mark.parametrize("kind", VISIBLE)
def test_each_worker_has_its_devices(node, kind):
    """Each worker of a node has devices of its own, of any kind that Ray knows, which its slot names."""
    with (
        RayVirtualCluster([2], accelerators={kind: 2}) as cluster,
        RayWorkerGroup(cluster, Worker) as group,
    ):
        slots, devices = cluster.slots(), group.call("devices").result()
        assert [{kind: tuple(ids[kind])} for ids, _ in devices] == [slot.accelerators for slot in slots]
        assert [variables[VISIBLE[kind]].split(",") for _, variables in devices] == [ids[kind] for ids, _ in devices]
        assert len({one for slot in slots for one in slot.accelerator_ids}) == 4


def test_a_part_of_a_device(node):
    """Bundles have equal parts of a device, on a node that has the requested model of it."""
    with RayVirtualCluster([8], accelerators={"GPU": 0.5}, accelerator_type="X1", reserve_timeout_s=0) as cluster:
        assert [slot.accelerator_ids for slot in cluster.slots()] == [(str(at // 2),) for at in range(8)]
    with pytest.raises(ResourceInsufficientError, match="cannot hold 1 bundles"):
        RayVirtualCluster([1], accelerator_type="X2", reserve_timeout_s=0).reserve()


def test_a_part_that_ray_does_not_give(node):
    """What Ray refuses to give to a process is a ValueError, and nothing stays reserved, as `no_leaks` checks."""
    with pytest.raises(ValueError, match="HPU resource quantity must be whole numbers"):
        RayVirtualCluster([1], accelerators={"HPU": 0.5}).reserve()


def test_workers_share_what_a_bundle_holds(node):
    """Two groups in the same bundles have half each of every resource there."""
    options = {"use_gpus": False, "max_colocated_worker_groups": 2}
    with (
        RayVirtualCluster([1], node_resource_constraints=[{"licence": 3, "memory": 1 << 20}], **options) as cluster,
        RayWorkerGroup(cluster, Worker, name_prefix="a") as first,
        RayWorkerGroup(cluster, Worker, name_prefix="b") as second,
    ):
        for group in (first, second):
            (held,) = group.call("resources").result()
            assert {name: amount for name, amount in held.items() if "group" not in name} == {
                "CPU": 1.0,
                "licence": 1.5,
                "memory": float(1 << 19),
            }
