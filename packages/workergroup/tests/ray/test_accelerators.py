# SPDX-License-Identifier: Apache-2.0
"""Workers with accelerators other than GPUs, which a node only pretends to have."""

import os

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup


class Worker:
    def devices(self):
        """Return the ids that Ray has assigned, and the variable that limits what the process sees."""
        return ray.get_runtime_context().get_accelerator_ids()["neuron_cores"], os.environ["NEURON_RT_VISIBLE_CORES"]

    def resources(self):
        return ray.get_runtime_context().get_assigned_resources()


@pytest.fixture(scope="module")
def node(raylets):
    resources = {"neuron_cores": 2, "licence": 4}
    with raylets({"num_cpus": 4, "resources": resources}, logging_level="error", log_to_driver=False) as made:
        yield made


def test_each_worker_has_its_core(node):
    """Each worker of a node has a core of its own, which its slot names."""
    with (
        RayVirtualCluster([2], use_gpus=False, node_resource_constraints=[{"neuron_cores": 1}]) as cluster,
        RayWorkerGroup(cluster, Worker) as group,
    ):
        devices = group.call("devices").result()
        assert [tuple(ids) for ids, _ in devices] == [slot.accelerator_ids for slot in cluster.slots()]
        assert [variable for _, variable in devices] == ["0", "1"]


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
