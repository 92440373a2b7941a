# SPDX-License-Identifier: Apache-2.0
"""Workers with accelerators of any kind, which a node only pretends to have."""

import os

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, WorkerOptions, WorkerStartError

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

    def look(self):
        """Return the first device that Ray has assigned, the devices that the process sees, and its LOCAL_RANK."""
        own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return own[0], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]

    def resources(self):
        return ray.get_runtime_context().get_assigned_resources()


class Configured(Worker):
    devices = None

    @classmethod
    def configure_worker(cls, num_gpus, bundle_indices):
        visible = {} if cls.devices is None else {"CUDA_VISIBLE_DEVICES": cls.devices}
        return {}, {"LOCAL_RANK": "3", **visible}, {}


class SeesAll(Configured):
    devices = "0,1,2,3"


RAY_SETS_THE_VARIABLES = "ray sets the variables"
# For tests of what does not depend on the variables.
once = pytest.mark.parametrize("node", [RAY_SETS_THE_VARIABLES], indirect=True)


@pytest.fixture(scope="module", params=[RAY_SETS_THE_VARIABLES, "ray leaves them alone"])
def node(raylets, request):
    resources = {kind: 4 for kind in VISIBLE if kind != "GPU"} | {"licence": 4, "accelerator_type:X1": 1}
    options = {"num_cpus": 8, "num_gpus": 4, "resources": resources}
    if request.param != RAY_SETS_THE_VARIABLES:
        options["env_vars"] = {f"RAY_EXPERIMENTAL_NOSET_{variable}": "1" for variable in VISIBLE.values()}
    with raylets(options, logging_level="error", log_to_driver=False) as made:
        yield made


# Workers have devices of one kind, or of several kinds at the same time.
each_kind = pytest.mark.parametrize("kinds", [["GPU"], ["HPU", "NPU", "TPU", "neuron_cores"]], ids="-".join)


@each_kind
def test_each_worker_has_its_devices(node, kinds):
    """Each worker of a node has devices of its own, of any kind that Ray knows, which its slot names."""
    with (
        RayVirtualCluster([2], accelerators=dict.fromkeys(kinds, 2)) as cluster,
        RayWorkerGroup(cluster, Worker) as group,
    ):
        slots, devices = cluster.slots(), group.call("devices").result()
        assert [{kind: tuple(ids[kind]) for kind in kinds} for ids, _ in devices] == [
            slot.accelerators for slot in slots
        ]
        for kind in kinds:
            assert [variables[VISIBLE[kind]].split(",") for _, variables in devices] == [
                ids[kind] for ids, _ in devices
            ]
            assert len({one for slot in slots for one in slot.accelerators[kind]}) == 4
        assert [variables["LOCAL_RANK"] for _, variables in devices] == ["0", "0"]


@each_kind
def test_each_worker_sees_all_devices_of_the_node(node, kinds):
    """With "node", a worker sees the devices of all workers of its node, and LOCAL_RANK is the index of its first."""
    with (
        RayVirtualCluster([2], accelerators=dict.fromkeys(kinds, 1)) as cluster,
        RayWorkerGroup(cluster, Worker, worker=WorkerOptions(visible_devices="node")) as group,
    ):
        slots = cluster.slots()
        for rank, (ids, variables) in enumerate(group.call("devices").result()):
            assert variables["LOCAL_RANK"] == str(rank)
            for kind in kinds:
                visible = variables[VISIBLE[kind]].split(",")
                assert visible == [one for slot in slots for one in slot.accelerators[kind]]
                assert ids[kind] == [visible[rank]]


def test_what_a_module_sees(node, tmp_path):
    """The devices are limited before the module of the class is imported."""
    (tmp_path / "seen_by.py").write_text(
        "import os\nSEEN = os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('LOCAL_RANK')\n"
        "class Worker:\n    def seen(self):\n        return SEEN\n"
    )
    with (
        RayVirtualCluster([2]) as cluster,
        RayWorkerGroup(cluster, "seen_by.Worker", env_vars={"PYTHONPATH": str(tmp_path)}) as group,
    ):
        assert group.call("seen").result() == [("0", "0"), ("1", "0")]


def test_a_shared_device(node):
    """Workers of a group may have a device in common."""
    with RayVirtualCluster([2], accelerators={"GPU": 0.5}) as cluster:
        for visible in ("own", "node"):
            with RayWorkerGroup(cluster, Worker, worker=WorkerOptions(visible_devices=visible)) as group:
                assert group.call("look").result() == [("0", "0", "0")] * 2


@once
def test_ray_options_of_a_class(node):
    """A worker has the Ray options of its class; what does not fit the bundle is refused."""
    with RayVirtualCluster([1], use_gpus=False, node_resource_constraints=[{"licence": 2}]) as cluster:
        cls = ray.remote(enable_task_events=False, resources={"licence": 0.5})(Worker)
        with RayWorkerGroup(cluster, cls) as group:
            assert group.call("resources").result()[0]["licence"] == 0.5
        with pytest.raises(ValueError, match="A worker requests 3 licence, but its bundle holds 2"):
            RayWorkerGroup(cluster, ray.remote(resources={"licence": 3})(Worker))


def test_variables_of_the_class(node):
    """What `configure_worker` returns counts, and a LOCAL_RANK without a device is refused."""
    with RayVirtualCluster([1]) as cluster:
        with pytest.raises(WorkerStartError, match=r"LOCAL_RANK is 3, but the worker sees only 1 .* GPU: 0"):
            RayWorkerGroup(cluster, Configured)
        with RayWorkerGroup(cluster, SeesAll) as group:
            assert group.call("look").result() == [("0", "0,1,2,3", "3")]


def test_a_process_keeps_what_it_sees(node):
    """A worker keeps the devices that it has seen when another rank moves, and its LOCAL_RANK is the index there."""
    with (
        RayVirtualCluster([3]) as cluster,
        RayWorkerGroup(cluster, Worker, workers_per_node=2, worker=WorkerOptions(visible_devices="node")) as group,
    ):
        assert group.call("look").result() == [("0", "0,1", "0"), ("1", "0,1", "1")]
        assert group.restart([0], elsewhere=True) == [0]
        assert group.call("look").result() == [("2", "2,1", "0"), ("1", "0,1", "1")]
