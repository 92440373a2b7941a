# SPDX-License-Identifier: Apache-2.0
"""Tests that call each class, method, argument and variable of the original systems once in its original form, on Ray.

The originals are NeMo RL and the slice executor of eFormer (later eray), at the commits that docs/migration.md names.
What docs/migration.md lists as different on purpose is called here as that page says.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, RaySystemError
from ray.util.placement_group import PlacementGroup
from uv import find_uv_bin

import fairlead_placement as placement
import fairlead_tpu_executor as tpu
import fairlead_venvs as venvs
import fairlead_workergroup as workergroup
from fairlead_batching import BatchedDataDict, DynamicBatchingArgs, SequencePackingArgs, SlicedDataDict, get_packer
from fairlead_placement import ClusterConfig, RayVirtualCluster, ResourceInsufficientError, init_ray
from fairlead_sharding import NamedSharding
from fairlead_tpu_executor import JobInfo, RayExecutor, SliceInfo, TpuAcceleratorConfig, TpuRemoteManager, device_remote
from fairlead_tpu_executor.testing import PretendSlices
from fairlead_workergroup import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup, WorkerFailureError

from . import original_workers
from .original_workers import Engine, FailsOnce, Meeting, Model, Trainer, double, fail, list_names, multiply

torch = pytest.importorskip("torch")
MIGRATION = Path(__file__).parent.parent / "docs" / "migration.md"
AXES = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
OVER_DP = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}
ONE = tpu.CpuAcceleratorConfig(core_count=1)
INFO = JobInfo("train", "running", "TPU")


def table(rows):
    """Return the parameters of a test: the name of a call, the call, and its value, of which `plain` is compared."""
    return pytest.mark.parametrize(("call", "expected"), [row[1:] for row in rows], ids=[row[0] for row in rows])


def plain(found):
    """Return tensors, arrays and batches as lists and dictionaries, and other values as they are."""
    if isinstance(found, BatchedDataDict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return type(found)(plain(one) for one in found)
    return found.tolist() if torch.is_tensor(found) or isinstance(found, np.ndarray) else found


def results(group, *args, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_sharded_data(*args, **kwargs))


def variables_of(group, *names):
    return group.get_all_worker_results(group.run_all_workers_single_data("read", names=list(names)))


@pytest.fixture(scope="module")
def kept(local_ray):
    """Yield what the tests on one node share, which ends before the tests on slices start their own cluster."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def cluster(kept):
    """Return two logical nodes of two bundles, each with room for two worker groups."""
    return kept.enter_context(RayVirtualCluster([2, 2], use_gpus=False, max_colocated_worker_groups=2, name="shared"))


@pytest.fixture(scope="module")
def group(kept, cluster):
    """Return a group that is made with all arguments by position."""
    builder = RayWorkerBuilder(Trainer, 1, folder=None)
    return kept.enter_context(RayWorkerGroup(cluster, builder, None, "trainer", None, AXES, {"MINE": "1"}))


# ---------------------------------------------------------------------------------------------------------- clusters


def test_init_ray(local_ray):
    """`init_ray` attaches to the Ray that runs; it takes a folder for logs and changes no variable."""
    before = dict(os.environ)
    assert init_ray() is not None
    assert init_ray(log_dir=None).address_info["gcs_address"] == ray.get_runtime_context().gcs_address
    assert dict(os.environ) == before


def test_cluster_by_position(local_ray):
    """A cluster takes its arguments by position, reserves at its first use, leases ports, and is shut down twice."""
    more = [{"memory": 2.0**20}, {}, {}]
    mine = RayVirtualCluster([2, 0, 1], False, 2, 4, "mine", "PACK", 21000, 21400, None, more)
    assert (mine.use_gpus, mine.max_colocated_worker_groups, mine.num_gpus_per_node) == (False, 2, 4)
    assert (mine.name, mine.placement_group_strategy, mine.segment_size) == ("mine", "PACK", None)
    assert (mine.port_range_low, mine.port_range_high, mine.node_resource_constraints) == (21000, 21400, more)
    assert (mine.world_size(), mine.node_count()) == (3, 2)
    groups = mine.get_placement_groups()
    assert [type(one) for one in groups] == [PlacementGroup] * 2
    assert [one.bundle_specs for one in groups] == [[{"CPU": 2.0, **more[0]}] * 2, [{"CPU": 2.0}]]
    assert mine.get_placement_groups() == groups
    pairs = [
        mine.get_available_address_and_port(1, 0),
        mine.get_available_address_and_port(pg_idx=0, bundle_idx=1),
        *mine.get_available_addresses_and_ports_batch([(0, 0), (1, 0)], 1),
        *mine.get_available_addresses_and_ports_batch(pg_bundle_pairs=[(0, 1)], batch_size=256),
        mine.get_master_address_and_port(),
        mine.get_master_address_and_port(),
    ]
    assert {address for address, _ in pairs} == {ray.nodes()[0]["NodeManagerAddress"]}
    assert len({port for _, port in pairs if 21000 <= port <= 21400}) == len(pairs) == 7
    assert [mine.shutdown(), mine.shutdown()] == [True, True]


def test_cluster_config(local_ray):
    """A `ClusterConfig` is a dictionary, of which a cluster can be made; defaults are those of the original."""
    config = ClusterConfig(gpus_per_node=2, num_nodes=3, master_port_range_low=21000, master_port_range_high=21400)
    mine = RayVirtualCluster.from_config(config, use_gpus=False)
    assert (config["gpus_per_node"], mine.world_size(), mine.node_count(), mine.port_range_low) == (2, 6, 3, 21000)
    mine = RayVirtualCluster([1])
    assert (mine.use_gpus, mine.max_colocated_worker_groups, mine.num_gpus_per_node, mine.name) == (True, 1, 8, "")
    assert (mine.port_range_low, mine.port_range_high) == (1400, 1999)
    assert (mine.segment_size, mine.node_resource_constraints) == (None, None)


def test_too_large(local_ray):
    """What the nodes cannot hold is refused, and what others hold is waited for until the deadline."""
    with pytest.raises(ResourceInsufficientError, match="1000"):
        RayVirtualCluster([1000], use_gpus=False).get_placement_groups()
    with RayVirtualCluster([5], use_gpus=False), pytest.raises(TimeoutError):
        RayVirtualCluster([12], use_gpus=False, reserve_timeout_s=1.0).get_placement_groups()


def test_grids(cluster, group, capsys):
    """The grid shows the workers of one group, of the groups in a list, or of all groups of the cluster."""
    cluster.print_cluster_grid()
    cluster.print_cluster_grid(group)
    cluster.print_cluster_grid(worker_group=group)
    texts = capsys.readouterr().out.split("Ray Cluster: 2 nodes, 4 CPUs")[1:]
    assert ["W 3" in text for text in texts] == [False, True, True]
    cluster.print_all_worker_groups()
    cluster.print_all_worker_groups(group)
    cluster.print_all_worker_groups([group])
    cluster.print_all_worker_groups(worker_groups=[group, group])
    shown = capsys.readouterr().out
    assert [shown.count(f"Global View: 2 nodes, 4 CPUs, Worker Groups: {count}") for count in (1, 2)] == [3, 1]


# ----------------------------------------------------------------------------------------------------- worker groups


def test_group_attributes(group, cluster):
    """A group has the original's attributes, and its workers' metadata the original's keys."""
    assert group.cluster is cluster
    assert (group.name_prefix, group.world_size, group.dp_size) == ("trainer", 4, 4)
    assert (group.sharding_annotations, group.dp_leader_worker_indices) == (AXES, [0, 1, 2, 3])
    assert (group.get_dp_leader_worker_idx(3), group.get_dp_leader_worker_idx(dp_shard_idx=0)) == (3, 0)
    with pytest.raises(IndexError, match="0 to 3"):
        group.get_dp_leader_worker_idx(4)
    assert (type(group.master_address), 1400 <= group.master_port <= 1999) == (str, True)
    assert len(group.workers) == 4
    assert ray.get(group.workers[2].rank.remote()) == 2
    keys = "node_idx", "local_rank", "global_rank", "name", "bundle_indices", "dp_shard_idx"
    assert [tuple(worker[key] for key in keys) for worker in group.worker_metadata] == [
        (node, 0, rank, f"trainer-{node}-{bundle}", (node, [bundle]), rank)
        for rank, (node, bundle) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)])
    ]


def test_worker_environment(group):
    """Workers have the variables of torch and those of the group, and not the lists of all addresses and ports."""
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "MINE", "AVAILABLE_PORT_LIST"
    address = group.master_address, str(group.master_port)
    assert variables_of(group, *names) == [[str(n), str(n), "4", *address, "0", "1", None] for n in range(4)]


def test_one_worker(group):
    """One worker is called by its index, by position and by keyword; the result is a reference."""
    ref = group.run_single_worker_single_data("echo", 3, data=1)
    assert (type(ref), ray.get(ref)) == (ray.ObjectRef, ((), {"data": 1}))
    assert ray.get(group.run_single_worker_single_data(method_name="rank", worker_idx=1)) == 1
    with pytest.raises(IndexError):
        group.run_single_worker_single_data("rank", 4)
    with pytest.raises(AttributeError, match="echo"):
        group.run_single_worker_single_data("missing", 0)
    with pytest.raises(LookupError, match="mine"):
        group.get_all_worker_results([group.run_single_worker_single_data("fail", 0)])


def test_same_data(group):
    """All workers, or those at coordinate 0 of some axes, get the same arguments; the result is a list."""
    refs = group.run_all_workers_single_data("give", data=np.ones(2), scale=3)
    assert [type(ref) for ref in refs] == [ray.ObjectRef] * 4
    assert plain(ray.get(refs)) == plain(group.get_all_worker_results(refs)) == [[3.0, 3.0]] * 4
    assert ray.get(group.run_all_workers_single_data(method_name="rank", run_rank_0_only_axes=["tp"])) == [0, 2]
    assert ray.get(group.run_all_workers_single_data("rank", run_rank_0_only_axes=["dp", "tp"])) == [0]


def test_different_data(group):
    """Each called worker gets its value of each list, and all get the common arguments."""
    refs = group.run_all_workers_multiple_data("give", data=[1, 2, 3, 4], common_kwargs={"scale": 10})
    assert ([type(ref) for ref in refs], ray.get(refs)) == ([ray.ObjectRef] * 4, [10, 20, 30, 40])
    refs = group.run_all_workers_multiple_data("give", data=[1, 2], scale=[3, 4], run_rank_0_only_axes=["tp"])
    assert ray.get(refs) == [3, 8]
    for lists in ({"data": [1]}, {"data": [1] * 5}, {"data": [1] * 4, "scale": [1] * 3}):
        with pytest.raises(ValueError):
            group.run_all_workers_multiple_data("give", **lists)


def test_different_data_without_data(group):
    """A call with different data for each worker has at least one list of data."""
    with pytest.raises(ValueError):
        group.run_all_workers_multiple_data("rank")


def test_sharded_data(group):
    """Pieces go along sharded axes and copies along replicated ones; of replicated outputs one is returned."""
    future = group.run_all_workers_sharded_data("give", data=["a", "b"], output_is_replicated=["tp"], **OVER_DP)
    assert isinstance(future, MultiWorkerFuture)
    assert (len(future.futures), future.called_workers, future.return_from_workers) == (4, [0, 1, 2, 3], [0, 2])
    assert group.get_all_worker_results(future) == ["a", "b"]
    assert results(group, "give", data=["a", "b"], common_kwargs={"scale": 2}, **OVER_DP) == ["aa", "aa", "bb", "bb"]
    nested = [["a", "b"], ["c", "d"]]
    assert results(group, method_name="give", data=nested, in_sharded_axes=["dp", "tp"]) == ["a", "b", "c", "d"]
    assert results(group, "give", data=nested, in_sharded_axes=["tp", "dp"]) == ["a", "c", "b", "d"]
    assert results(group, "give", data="all", replicate_on_axes=["dp", "tp"]) == ["all"] * 4
    for wrong in ({"in_sharded_axes": ["pp"]}, {"in_sharded_axes": ["dp"], "replicate_on_axes": ["dp"]}):
        with pytest.raises(ValueError):
            group.run_all_workers_sharded_data("give", data=["a", "b"], **wrong)


@pytest.mark.parametrize(("dummies", "called"), [(False, [0, 2]), (True, [0, 1, 2, 3])])
def test_dummy_calls(group, dummies, called):
    """Workers off coordinate 0 of a free axis are called with None if that is wanted, and return nothing."""
    axes = {"in_sharded_axes": ["dp"], "make_dummy_calls_to_free_axes": dummies}
    future = group.run_all_workers_sharded_data("give", data=["a", "b"], **axes)
    assert (future.called_workers, future.return_from_workers) == (called, [0, 2])
    assert future.get_results(group) == ["a", "b"]


def test_futures_of_users(group):
    """A future can be made by position and by keyword, and returns the results of the ranks that are named."""
    refs = group.run_all_workers_single_data("rank")
    assert MultiWorkerFuture(refs).get_results(group) == [0, 1, 2, 3]
    assert MultiWorkerFuture(refs, [3, 1]).get_results(worker_group=group) == [3, 1]
    named = MultiWorkerFuture(futures=refs[:2], return_from_workers=[7], called_workers=[5, 7])
    assert named.get_results(group, return_generators_as_proxies=False) == [1]
    assert group.get_all_worker_results(future_bundle=named) == [1]


@pytest.mark.parametrize("proxies", [False, True])
def test_ranks_that_were_not_called(group, proxies):
    """A rank that was not called has no result, and no generator."""
    refs = group.run_all_workers_multiple_data("items", count=[2, 1, 0, 0])
    future = MultiWorkerFuture(refs[:2], return_from_workers=[1, 3], called_workers=[0, 1])
    found = group.get_all_worker_results(future, return_generators_as_proxies=proxies)
    assert ([ray.get(item) for item in found[0]] if proxies else found) == [10]


def test_generators(group):
    """The items of generators are collected, or the generators are returned as proxies that give references."""
    refs = group.run_all_workers_multiple_data("items", count=[2, 0, 1, 0])
    assert group.get_all_worker_results(refs) == [0, 1, 20]
    refs = group.run_all_workers_single_data("items", count=2)
    proxies = group.get_all_worker_results(refs, return_generators_as_proxies=True)
    assert [type(proxy) for proxy in proxies] == [ray.ObjectRefGenerator] * 4
    assert [ray.get(item) for item in proxies[1]] == [10, 11]
    future = group.run_all_workers_sharded_data("items", count=[1, 2], output_is_replicated=["tp"], **OVER_DP)
    assert [[ray.get(item) for item in proxy] for proxy in future.get_results(group, True)] == [[0], [20, 21]]


def test_map(group):
    """`map` gives each item to one worker: in turn, to the one with the fewest items, or as a function decides."""
    assert list(group.map("echo", range(5))) == [((number,), {}) for number in range(5)]
    assert list(group.map("give", [1, 2, 3], max_in_flight=1, ordered=True, strategy="round_robin")) == [1, 2, 3]
    assert sorted(group.map("give", range(6), ordered=False, strategy="least_loaded")) == [0, 1, 2, 3, 4, 5]
    loads = []
    assert list(group.map("give", [1, 2], strategy=lambda each: loads.append(len(each)) or 0)) == [1, 2]
    assert set(loads) == {4}


def test_watching(group, gate, eventually):
    """Status, usage and stuck workers can be read while a worker is busy."""
    ray.get(group.run_single_worker_single_data("step", 1, number=7))
    waiting = group.run_single_worker_single_data("wait_for", 2, gate=str(gate))
    assert eventually(lambda: group.get_worker_status()[2].state == "busy")
    status = group.get_worker_status()
    assert [one.state for one in status] == ["idle", "idle", "busy", "idle"]
    assert (status[2].method, status[2].rank, status[2].name, status[2].restarts) == ("wait_for", 2, "trainer-1-0", 0)
    assert (status[1].step, status[1].message, status[1].coords) == (7, "a step", {"dp": 0, "tp": 1})
    usage = group.get_resource_usage()
    assert [one.rank for one in usage] == [0, 1, 2, 3]
    assert all(one.rss_bytes > 0 and one.cpu_percent >= 0 and one.num_threads > 0 for one in usage)
    assert group.detect_stuck_workers() == []
    assert group.detect_stuck_workers(timeout_s=600, dump_stacks=False) == []
    assert eventually(lambda: len(group.detect_stuck_workers(0.01)) == 1)
    (stuck,) = group.detect_stuck_workers(timeout_s=0.01, dump_stacks=True)
    assert (stuck.rank, stuck.method, "in wait_for" in stuck.stacks) == (2, "wait_for", True)
    gate.touch()
    assert ray.get(waiting) is None
    assert group.restart_failed_workers() == []


def test_workers_per_node_and_cleanup(cluster, group, tmp_path):
    """The number of workers is given for each node or for all; a shutdown runs a cleanup method on all workers."""
    builder = RayWorkerBuilder(Trainer, folder=str(tmp_path))
    with RayWorkerGroup(cluster, builder, workers_per_node=[0, 1], env_vars={"MINE": "2"}) as second:
        assert (second.name_prefix, second.dp_size, second.worker_metadata[0]["node_idx"]) == ("Trainer", 1, 1)
        assert variables_of(second, "MINE", "RANK") == [["2", "0"]]
        assert second.shutdown("save", 60.0, False) is True
        assert [path.name for path in tmp_path.iterdir()] == ["saved-0"]
        assert (second.workers, second.worker_metadata) == ([], [])
        assert second.shutdown(cleanup_method="save", timeout=None, force=True) is True
    second = RayWorkerGroup(cluster, builder, 1)
    assert second.world_size == 2
    assert second.shutdown(cleanup_method="fail") is False
    for wrong in (3, [1], [1, 3]):
        with pytest.raises(ValueError):
            RayWorkerGroup(cluster, builder, workers_per_node=wrong)
    with pytest.raises(ValueError):
        RayWorkerGroup(cluster, builder, sharding_annotations=NamedSharding([0, 1], ["dp"]))


@pytest.mark.parametrize("wrong", ["2", 1.0, {"0": 1}])
def test_wrong_type_of_workers_per_node(cluster, wrong):
    """What is neither a number nor a list is a ValueError."""
    with pytest.raises(ValueError):
        RayWorkerGroup(cluster, RayWorkerBuilder(Trainer), workers_per_node=wrong)


def test_bundles_beside_workers_per_node(cluster):
    """With a list of bundles, the number of workers on each node is ignored."""
    bundles = [(0, [0])]
    with RayWorkerGroup(cluster, RayWorkerBuilder(Trainer), workers_per_node=2, bundle_indices_list=bundles) as second:
        assert second.world_size == 1


def test_whole_environment(cluster, monkeypatch):
    """The environment of a driver under torchrun can be given as it is: the group's own values win."""
    for name, value in {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "RAY_JOB_ID": "x", "MINE": "3"}.items():
        monkeypatch.setenv(name, value)
    with RayWorkerGroup(cluster, RayWorkerBuilder(Trainer), 1, env_vars=dict(os.environ)) as second:
        assert variables_of(second, "RANK", "WORLD_SIZE", "MINE") == [["0", "2", "3"], ["1", "2", "3"]]


def test_class_by_its_full_name(cluster, group):
    """A class is given by its full name; its `_default_options` and `configure_worker` are honoured on its node."""
    builder = RayWorkerBuilder("original_workers.Tagged", tag="unset")
    assert builder.ray_actor_class_fqn == "original_workers.Tagged"
    assert (builder.args, builder.kwargs) == ((), {"tag": "unset"})
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    with RayWorkerGroup(cluster, builder, [1, 0], env_vars=path) as second:
        found = second.get_all_worker_results(second.run_all_workers_single_data("state"))
        assert (found, second.name_prefix) == ([((0, [0]), "configured", "class")], "Tagged")


def test_gpus_and_tied_groups(local_ray, eventually):
    """Clusters choose GPUs and watch memory; tied workers configure themselves; two groups share the slots."""
    options = {"enable_colocation": True, "gpu_ids": [0, 1], "monitor_memory": True, "communication_backend": "gloo"}
    tied = [(0, [0, 1])]
    builder = RayWorkerBuilder(Engine, "a model")
    with (
        RayVirtualCluster([2], num_gpus_per_node=2, **options) as mine,
        RayWorkerGroup(mine, builder, bundle_indices_list=tied, env_vars={"OF_GROUP": "group"}) as engines,
    ):
        assert [slot.accelerator_ids for slot in mine.slots()] == [("0",), ("1",)]
        assert (mine.max_colocated_worker_groups, mine.communication_backend) == (2, "gloo")
        assert eventually(lambda: mine.get_resource_usage()[0].samples > 2)
        assert (engines.dp_size, engines.dp_leader_worker_indices, engines.get_dp_leader_worker_idx(0)) == (1, [0], 0)
        shown = [(worker["name"], worker["local_rank"], worker["bundle_indices"]) for worker in engines.worker_metadata]
        assert shown == [("Engine-grp0-0", 0, tied[0]), ("Engine-grp0-1", 1, None)]
        made_with = [("a model", tied[0], 1), ("a model", None, 0)]
        env = {"ASKED": "0.5 2", "OVERRIDE": "1", "OF_CLASS": "class", "OF_GROUP": "group"}
        found = engines.get_all_worker_results(engines.run_all_workers_single_data("state"))
        assert found == [(made_with[rank], 0.25, {**env, "RANK": str(rank)}) for rank in (0, 1)]
        with RayWorkerGroup(mine, RayWorkerBuilder(Trainer), 1, enable_gradient_compression=True) as trainers:
            refs = trainers.run_all_workers_single_data("compression")
            assert trainers.get_all_worker_results(refs) == [("fp16", "gloo")]
            with pytest.raises(ResourceInsufficientError, match="max_colocated_worker_groups"):
                RayWorkerGroup(mine, builder, workers_per_node=1)


def test_async_communication(cluster, group):
    """Async methods of a worker overlap with `async_communication=True`."""
    with RayWorkerGroup(cluster, RayWorkerBuilder(Meeting), [1, 0], async_communication=True) as second:
        waiting = second.run_single_worker_single_data("wait", 0)
        ray.get(second.run_single_worker_single_data("arrive", 0))
        assert ray.get(waiting) == "met"


def test_restarts(cluster, group):
    """A worker that passes `memory_limit` or dies raises, the next call restarts it, and `max_restarts` limits that."""
    options = {"restart_on_failure": True, "max_restarts": 1, "memory_limit": "400MB"}
    balancing = {"enable_load_balancing": True, "load_balancing_strategy": "least_loaded"}
    with RayWorkerGroup(cluster, RayWorkerBuilder(Trainer), 1, **options, **balancing) as second:
        for kind, method, arguments in (("out-of-memory", "grow", {"size": 500_000_000}), ("killed", "die", {})):
            assert second.get_all_worker_results(second.run_all_workers_single_data("rank")) == [0, 1]
            with pytest.raises(WorkerFailureError) as caught:
                second.get_all_worker_results([second.run_single_worker_single_data(method, 1, **arguments)])
            assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, kind)]
            assert second.get_worker_status()[1].state == "dead"
        assert [one.restarts for one in second.get_worker_status()] == [0, 1]
        assert sorted(second.at(worker=slice(0, 1)).map("give", [1, 2])) == [1, 2]
        with pytest.raises(WorkerFailureError, match="max_restarts"):
            second.run_all_workers_single_data("rank")
    with pytest.raises(ValueError):
        RayWorkerGroup(cluster, RayWorkerBuilder(Trainer), 1, memory_limit="lots")


@pytest.mark.parametrize("restarts", [False, True])
def test_death_met_by_ray_get(cluster, group, restarts):
    """After `ray.get` has met a death, the next call raises it, or restarts the worker first."""
    with RayWorkerGroup(cluster, RayWorkerBuilder(Trainer), [1, 0], restart_on_failure=restarts) as second:
        with pytest.raises(RayActorError):
            ray.get(second.run_single_worker_single_data("die", 0))
        with contextlib.nullcontext() if restarts else pytest.raises(WorkerFailureError):
            assert ray.get(second.run_all_workers_single_data("rank")) == [0]


def test_builder(cluster, group):
    """A builder starts one worker in a bundle, with the options of the class and of the caller."""
    options = {"runtime_env": {"env_vars": {"OF_GROUP": "caller"}}, "num_cpus": 1}
    worker = RayWorkerBuilder(Engine, "a model")(cluster.get_placement_groups()[1], 1, 0, (1, [1]), **options)
    try:
        made_with, gpus, env = ray.get(worker.state.remote())
        assert (made_with, gpus) == (("a model", (1, [1]), 1), None)
        assert (env["OF_CLASS"], env["OF_GROUP"]) == ("class", "caller")
    finally:
        ray.kill(worker)


def test_builder_async(cluster, group):
    """The future of an asynchronous start resolves to the worker."""
    where = {"placement_group": cluster.get_placement_groups()[0], "placement_group_bundle_index": 0}
    made = [RayWorkerBuilder(Trainer).create_worker_async(**where, num_gpus=0, bundle_indices=None, runtime_env={})]
    workers = ray.get([future for future, _ in made])
    try:
        assert [isinstance(worker, ray.actor.ActorHandle) for worker in workers] == [True]
        assert ray.get(workers[0].echo.remote(1)) == ((1,), {})
    finally:
        ray.kill(made[0][1])


# ------------------------------------------------------------------------------------------------------ environments


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Yield the command of a locked project without packages, with a folder for environments."""
    project = tmp_path_factory.mktemp("project")
    text = '[project]\nname = "empty"\nversion = "0.1"\nrequires-python = ">=3.11"\n[tool.uv]\npackage = false\n'
    (project / "pyproject.toml").write_text(text)
    lock = [find_uv_bin(), "lock", "--offline", "--python", sys.executable]
    subprocess.run(lock, cwd=project, check=True, capture_output=True, timeout=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path_factory.mktemp("venvs")))
        yield f"uv run --locked --directory {project}"


def test_environments(local_ray, command):
    """A uv command becomes an environment here and on each node, with the name of a class; it can be rebuilt."""
    name = "original_workers.Trainer"
    python = venvs.create_local_venv(command, name, False)
    assert Path(os.environ["FAIRLEAD_VENV_DIR"]) in Path(python).parents
    assert venvs.create_local_venv(py_executable=command, venv_name=name, force_rebuild=True) == python
    assert venvs.create_local_venv_on_each_node(command, name) == python
    assert venvs.create_local_venv_on_each_node(py_executable=command, venv_name=name) == python
    assert subprocess.run([python, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"


@pytest.fixture(scope="module")
def registered(local_ray, tmp_path_factory):
    """Register another path of this Python for a class, and yield the path with the runtime_env of the class."""
    folder = tmp_path_factory.mktemp("registered") / "env"
    folder.symlink_to(sys.prefix)
    path = str(folder / "bin" / Path(sys.executable).name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(venvs.actor_environments, "a.b.Worker", path)
        yield path, venvs.make_actor_runtime_env("a.b.Worker")


def test_registry(registered):
    """The Python of a registered class is found by its full name, and made into the runtime_env of its actors."""
    path, runtime_env = registered
    assert sys.executable == venvs.PY_EXECUTABLES.SYSTEM
    assert venvs.PY_EXECUTABLES.BASE.startswith("uv run --locked")
    assert "--extra vllm" in venvs.PY_EXECUTABLES.VLLM
    assert venvs.get_actor_python_env("a.b.Worker") == venvs.get_actor_python_env(actor_class_fqn="a.b.Worker") == path
    with pytest.raises(ValueError, match=r"a\.b\.Other"):
        venvs.get_actor_python_env("a.b.Other")
    assert runtime_env["py_executable"] == path
    for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"):
        assert runtime_env["env_vars"][name] == path.rpartition("/bin/")[0]


# ------------------------------------------------------------------------------------------- the executor on one node


def test_execute(local_ray):
    """`execute` runs a remote function on all workers, and returns a status with the results in order."""
    status = RayExecutor.execute(double, tpu.CpuAcceleratorConfig(core_count=1, worker_count=2), x=4)
    assert isinstance(status, tpu.JobSucceeded)
    assert status.result == [(8, 0), (8, 1)]
    assert (type(status.info), status.info.name, status.info.kind) == (JobInfo, "double", "cpu")
    failed = RayExecutor.execute(remote_fn=fail, accelerator_config=ONE)
    assert isinstance(failed, tpu.JobFailed)
    assert failed.error.args == ("mine",)
    with pytest.raises(ValueError, match="autoscale_execute"):
        RayExecutor.execute(double, TpuAcceleratorConfig("v4-8", 2), x=4)


def test_other_executions(local_ray):
    """The other three return a status, or the results themselves; options come by position or by keyword."""
    assert RayExecutor.autoscale_execute(double, ONE, False, x=1).result == [[(2, 0)]]
    assert RayExecutor.execute_resumable(double, tpu.GpuAcceleratorConfig(device_count=1), 5, 3, x=2) == [(4, 0)]
    options = {"max_retries_preemption": 5, "max_retries_failure": 0}
    assert RayExecutor.autoscale_execute_resumable(double, ONE, **options, flatten=False, x=3) == [[(6, 0)]]
    with pytest.raises(LookupError, match="mine"):
        RayExecutor.execute_resumable(remote_fn=fail, accelerator_config=ONE, **options)


@pytest.mark.parametrize("name", ["execute", "autoscale_execute", "execute_resumable", "autoscale_execute_resumable"])
def test_decorators(local_ray, name):
    """Each decorator takes the configuration, keeps the name of a remote function, and passes keywords on."""
    decorated = getattr(tpu, name)(accelerator_config=ONE)(double)
    assert decorated.__name__ == "double"
    found = decorated(x=5, y=1)
    assert (found if name.endswith("resumable") else found.result) == [(11, 0)]


BUDGETS = {"max_retries_preemption": 5, "max_retries_failure": 3}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("execute_resumable", BUDGETS, ["x"]),
        ("autoscale_execute", {"flatten": False}, [["x"]]),
        ("autoscale_execute_resumable", {**BUDGETS, "flatten": False}, [["x"]]),
        ("execute", {"flatten": False}, ["flatten", "x"]),
    ],
)
def test_options_in_the_call(local_ray, name, options, expected):
    """Options in the call of a decorated function are options, if the function does not name such a parameter."""
    found = getattr(tpu, name)(ONE)(ray.remote(list_names))(x=1, **options)
    assert (found if name.endswith("resumable") else found.result)[0] == expected


NEVER = tpu.CpuAcceleratorConfig(core_count=1000, scale_timeout_s=0.0)
NO_SLICES = TpuRemoteManager("v4-8", 1, scale_timeout_s=0.0)
NO_POOL = tpu.SlicePoolManager("v4-8", scale_timeout_s=0.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tpu.execute(NEVER)(double)(),
        lambda: tpu.execute_resumable(NEVER)(double)(z=1),
        lambda: tpu.autoscale_execute(NEVER)(ray.remote(multiply))(z=1),
        lambda: RayExecutor.autoscale_execute_resumable(multiply, NEVER, x=1, z=1),
        lambda: device_remote(accelerator_config=NEVER)(multiply)(),
        lambda: device_remote(accelerator_config=NEVER)(multiply).remote(1, 2, 3),
        lambda: device_remote(accelerator_config=NEVER)(Model)(),
        lambda: NO_SLICES.run_function(multiply),
        lambda: NO_SLICES.run_class_method(Model, (), {}, "train", 1),
        lambda: NO_SLICES.run_class_method(Model, (1,), {}, "train"),
        lambda: NO_POOL.execute_on_each_slice(multiply),
        lambda: NO_POOL.execute_on_each_host(multiply, 1, z=1),
    ],
)
def test_wrong_arguments(local_ray, call):
    """A call that the function cannot take is a TypeError before anything is reserved."""
    with pytest.raises(TypeError, match="cannot take the arguments of this call"):
        call()


def test_device_remote(local_ray):
    """A function and a class return values when they are called, and references by `.remote`; both can be closed."""
    compute = device_remote(accelerator_config=ONE)(multiply)
    with contextlib.closing(compute):
        assert compute.__doc__ == multiply.__doc__
        assert compute(3, y=2) == [6]
        assert ray.get(compute.remote(4)) == [4]
    model = device_remote(accelerator_config=ONE, flatten=False)(Model)(10)
    with contextlib.closing(model):
        assert model.train(2) == [[20]]
        assert ray.get(model.train.remote(data=3, steps=2)[0]) == [60]
        with pytest.raises(TypeError, match="missing a required argument: 'data'"):
            model.train()


def test_two_instances(local_ray):
    """While instances of a class exist, others are refused by an error that says to close them."""
    remote_model = device_remote(accelerator_config=ONE)(Model)
    with remote_model, contextlib.closing(remote_model(1)):
        with pytest.raises(tpu.OpenInstancesError, match="Close them first") as caught:
            remote_model(2)
        assert "enable_colocation" not in str(caught.value)


# ------------------------------------------------------------------------------------------ values and pure functions

TOPOLOGY = {"c": ("x", 1), "b": ("x", 0), "a": ("y", 0), "d": ("y", 1), "e": ("x", 2)}
SEGMENTS = {"topology": TOPOLOGY, "segment_size": 1, "num_nodes": 1}
PARTLY_UNKNOWN = {"a": ("unknown", -1), "b": ("x", 1)}
ROWS = [(1, "x", 1, "b"), (0, "x", 0, "a"), (0, "x", 1, "b")]
BUNDLES = {"bundle_data": ROWS, "segment_size": 1, "gpus_per_node": 2}
OF_CLASS = {"num_cpus": 1, "runtime_env": {"env_vars": {"A": "1", "B": "1"}, "_nsight": {"t": "cuda"}}}
OF_CALLER = {"num_cpus": 2, "runtime_env": {"env_vars": {"B": "2"}}}
OPTIONS = {"default_options": OF_CLASS, "extra_options": OF_CALLER}
MERGED = {"num_cpus": 2, "runtime_env": {"env_vars": {"A": "1", "B": "2"}, "nsight": {"t": "cuda"}}}
GRID = NamedSharding([[[0, 1, 2, 3], [4, 5, 6, 7]]], ["dp", "pp", "tp"])
VARIABLES = {"env_vars": {"A": "1"}}
SLICE = {"slice_name": "slice-0", "num_hosts": 8, "ip_address": "10.0.1.10", "num_accelerators_per_host": 4}
LENGTHS = [7, 2, 6]
ON_ONE = device_remote(accelerator_config=ONE)


TOKENS = [[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0], [8, 9, 10, 0]]
SIZES = {"input_key": "tokens", "input_lengths_key": "length", "max_tokens_per_microbatch": 8}
DYNAMIC = {**SIZES, "sequence_length_round": 2}
PACKED = {**SIZES, "algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 1}
CAPITALS = {**PACKED, "algorithm": "CONCATENATIVE", "microbatch_order": None}
ALGORITHMS = ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
WHOLE = 0, 1, 2, 3
join = BatchedDataDict.from_batches
JOINED = [{"x": torch.tensor([[1, 2]]), "y": ["a"]}, {"x": torch.tensor([[3]]), "y": ["b"]}]
NESTED = BatchedDataDict({"x": [[1]]})


def batch():
    leaves = {"tokens": torch.tensor(TOKENS), "length": torch.tensor([4, 2, 1, 3]), "name": ["a", "b", "c", "d"]}
    return BatchedDataDict(leaves)


def picked(*rows, width=4):
    """Return some rows of the batch as plain values."""
    whole = plain(batch())
    return {key: [whole[key][row][:width] if key == "tokens" else whole[key][row] for row in rows] for key in whole}


def changed(method, *args, **kwargs):
    """Return a batch after one of its methods has changed it."""
    made = batch()
    getattr(made, method)(*args, **kwargs)
    return made


def gather():
    """Gather a batch in a process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return batch().all_gather(torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


def attributes(config, names):
    """Return attributes of a configuration, after a copy with more variables has been made of it."""
    more = config.with_environment_variables({"B": "2"}, C="3")
    assert isinstance(more, tpu.AcceleratorConfigType)
    own = (config.execution_env or {}).get("env_vars", {})
    assert more.execution_env["env_vars"] == {**own, "B": "2", "C": "3"}
    return [getattr(config, name) for name in names.split()]


@table(
    [
        ("segments", lambda: placement.select_segment_nodes(TOPOLOGY, 2, 4), (["b", "c", "a", "d"], ["e"])),
        ("segments, named", lambda: placement.select_segment_nodes(**SEGMENTS), (["b"], ["c", "e", "a", "d"])),
        ("sorted", lambda: placement.sort_bundle_indices_by_topology(ROWS), [1, 2, 0]),
        ("sorted segments", lambda: placement.sort_bundle_indices_by_topology(**BUNDLES), [2, 0]),
        ("unknown domain", lambda: placement.select_segment_nodes(PARTLY_UNKNOWN, 1, 1), (["b"], ["a"])),
        ("no GPUs", lambda: RayVirtualCluster([1], False, num_gpus_per_node=0).num_gpus_per_node, 0),
        ("constraints", lambda: RayVirtualCluster([1, 2], node_resource_constraints=[{"x": 1}, None]).world_size(), 3),
        ("no free port", lambda: issubclass(placement.PortUnavailableError, RuntimeError), True),
        ("options", lambda: workergroup.recursive_merge_options(OF_CLASS, OF_CALLER), MERGED),
        ("options, named", lambda: workergroup.recursive_merge_options(**OPTIONS), MERGED),
        ("options stay", lambda: "_nsight" in OF_CLASS["runtime_env"], True),
        ("shape", lambda: GRID.shape, {"dp": 1, "pp": 2, "tp": 4}),
        ("names", lambda: GRID.names, ["dp", "pp", "tp"]),
        ("ndim, size", lambda: (GRID.ndim, GRID.size), (3, 8)),
        ("layout", lambda: GRID.layout, [[[0, 1, 2, 3], [4, 5, 6, 7]]]),
        ("coords", lambda: GRID.get_worker_coords(6), {"dp": 0, "pp": 1, "tp": 2}),
        ("coords, named", lambda: GRID.get_worker_coords(worker_id=0), {"dp": 0, "pp": 0, "tp": 0}),
        ("by coord", lambda: (GRID.get_ranks_by_coord(tp=1), GRID.get_ranks_by_coord(tp=4)), ([1, 5], [])),
        ("ranks", lambda: GRID.get_ranks(dp=0, pp=1), NamedSharding([4, 5, 6, 7], ["tp"])),
        ("one rank", lambda: GRID.get_ranks(dp=0, pp=1, tp=3), 7),
        ("axis index", lambda: (GRID.get_axis_index("tp"), GRID.get_axis_index(name="dp")), (2, 0)),
        ("axis size", lambda: (GRID.get_axis_size("pp"), GRID.get_axis_size(name="tp")), (2, 4)),
        ("axis zero", lambda: NamedSharding.is_axis_zero({"tp": 0, "dp": 1}, ["tp", "cp"]), True),
        ("axis not zero", lambda: GRID.is_axis_zero(coords={"tp": 1}, axes=["tp"]), False),
        ("floats, named", lambda: NamedSharding(layout=np.array([0.0, 1.0]), names=["dp"]).layout, [0, 1]),
        ("repr", lambda: repr(GRID)[:57], "NamedSharding(shape=(1, 2, 4), names=['dp', 'pp', 'tp'], "),
        ("tpu", lambda: attributes(TpuAcceleratorConfig("v4-16", 2), "tpu_version pod_count"), ["v4-16", 2]),
        ("tpu, named", lambda: attributes(TpuAcceleratorConfig(tpu_version="v4-8"), "pod_count cpu_count"), [1, 2]),
        ("tpu env", lambda: attributes(TpuAcceleratorConfig(execution_env=VARIABLES), "execution_env"), [VARIABLES]),
        ("gpu", lambda: attributes(tpu.GpuAcceleratorConfig(), "device_count gpu_model cpu_count"), [1, None, 1]),
        ("gpu, named", lambda: attributes(tpu.GpuAcceleratorConfig(gpu_model="A100"), "gpu_model"), ["A100"]),
        ("gpus", lambda: attributes(tpu.GpuAcceleratorConfig(2, worker_count=4), "device_count worker_count"), [2, 4]),
        ("cpu", lambda: attributes(tpu.CpuAcceleratorConfig(8, worker_count=2), "core_count worker_count"), [8, 2]),
        ("names of variables", lambda: tpu.ENV_CALL_INDEX, "EXECUTOR_CALL_INDEX"),
        ("more names of variables", lambda: tpu.ENV_CALL_SLICE, "EXECUTOR_CALL_SLICE"),
        ("port", lambda: tpu.MEGASCALE_DEFAULT_PORT, 8081),
        ("info, named", lambda: JobInfo(name="train", state="running", kind="TPU"), INFO),
        ("status", lambda: tpu.JobStatus(INFO).info, INFO),
        ("succeeded", lambda: tpu.JobSucceeded(INFO, [1]) == tpu.JobSucceeded(info=INFO, result=[1]), True),
        ("failed", lambda: tpu.JobFailed(INFO, KeyError).error is tpu.JobFailed(info=INFO, error=KeyError).error, True),
        ("preempted", lambda: tpu.JobPreempted(info=INFO, error=KeyError).error, KeyError),
        ("error", lambda: tpu.JobError(info=INFO, error=KeyError).error, KeyError),
        ("error of a node", lambda: type(tpu.handle_ray_error(INFO, NodeDiedError("gone"))), tpu.JobPreempted),
        ("error of Ray", lambda: type(tpu.handle_ray_error(INFO, RaySystemError("gone"))), tpu.JobError),
        ("too few slices", lambda: issubclass(tpu.InsufficientSlicesError, RuntimeError), True),
        ("no references", lambda: (tpu.resolve_maybe_refs([1, "a"]), tpu.resolve_maybe_refs([])), ([1, "a"], [])),
        ("references, named", lambda: tpu.resolve_maybe_refs(items=[1]), [1]),
        ("error of Ray, named", lambda: tpu.handle_ray_error(job_info=INFO, e=RayError()).info, INFO),
        ("slice", lambda: SliceInfo(*SLICE.values()).ip_address, "10.0.1.10"),
        ("slice, named", lambda: SliceInfo(**SLICE).num_hosts, 8),
        ("tpu, by type", lambda: TpuAcceleratorConfig(type="v4-8", preemptible=True).tpu_version, "v4-8"),
        ("tpu, no env", lambda: TpuAcceleratorConfig("v4-8").execution_env.get("env_vars", {}), {}),
        ("gpu, by type", lambda: attributes(tpu.GpuAcceleratorConfig(count=1, type="v100"), "gpu_model"), ["V100"]),
        ("manager", lambda: TpuRemoteManager("v4-8", 2, base_env={"A": "1"}).base_env, {"A": "1"}),
        ("manager, named", lambda: TpuRemoteManager(tpu_version="v4-8", pod_count=2, coord_port=9).coord_port, 9),
        ("manager of v4", lambda: TpuRemoteManager(tpu_version="v4", pod_count=2).tpu_version, "v4"),
        ("manager, port", lambda: TpuRemoteManager("v4-8", 1).coord_port, 8081),
        ("manager, text", lambda: TpuRemoteManager("v4-8", "2", coord_port="9").pod_count, 2),
        ("device class", lambda: ON_ONE(Model).__name__, "Model"),
        ("device function", lambda: (ON_ONE(multiply).__name__, ON_ONE(multiply).__wrapped__), ("multiply", multiply)),
        ("tpu_remote", lambda: type(tpu.tpu_remote(accelerator_config=ONE)(Model)), tpu.DeviceClass),
        ("size", lambda: batch().size, 4),
        ("get_dict", lambda: BatchedDataDict(batch().get_dict()), picked(*WHOLE)),
        ("join", lambda: join(JOINED, {"x": -1}), {"x": [[1, 2], [3, -1]], "y": ["a", "b"]}),
        ("join, named", lambda: join(batches=JOINED, pad_value_dict=None)["x"], [[1, 2], [3, 0]]),
        ("join without media", lambda: join(JOINED, allow_missing_packed_tensors=False)["y"], ["a", "b"]),
        ("join nothing", lambda: (type(join([], {"x": 0})), join([])), (BatchedDataDict, {})),
        ("chunk", lambda: [batch().chunk(1, 2), batch().chunk(rank=0, chunks=4)], [picked(2, 3), picked(0)]),
        ("slice", lambda: [batch().slice(1, 3), batch().slice(start=0, end=1)], [picked(1, 2), picked(0)]),
        ("select", lambda: batch().select_indices([3, 0]), picked(3, 0)),
        ("select, named", lambda: batch().select_indices(indices=torch.tensor([1])), picked(1)),
        ("reorder", lambda: changed("reorder_data", [1, 2, 3, 0]), picked(3, 0, 1, 2)),
        ("reorder, named", lambda: changed("reorder_data", reorded_indices=[3, 0, 1, 2]), picked(1, 2, 3, 0)),
        ("repeat", lambda: batch().slice(0, 2).repeat_interleave(2), picked(0, 0, 1, 1)),
        ("repeat, named", lambda: batch().repeat_interleave(num_repeats=1), picked(*WHOLE)),
        ("repeats", lambda: batch().slice(0, 1).repeat_interleave(repeats=2), picked(0, 0)),
        ("repeat media", lambda: batch().repeat_interleave(1, share_immutable_media=True), picked(*WHOLE)),
        ("repeat copies", lambda: [one is NESTED["x"][0] for one in NESTED.repeat_interleave(2)["x"]], [False, False]),
        ("truncate", lambda: changed("truncate_tensors", 1, 2), picked(*WHOLE, width=2)),
        ("truncate, named", lambda: changed("truncate_tensors", dim=1, truncated_len=3), picked(*WHOLE, width=3)),
        ("to", lambda: batch().to("cpu").to(device=torch.device("cpu")), picked(*WHOLE)),
        ("gather", gather, picked(*WHOLE)),
        ("get_batch", lambda: batch().get_batch(1, 2), picked(2, 3)),
        ("get_batch, named", lambda: batch().get_batch(batch_idx=0, batch_size=2), picked(0, 1)),
        ("microbatches", lambda: list(batch().make_microbatch_iterator(2)), [picked(0, 1), picked(2, 3)]),
        ("microbatches, named", lambda: next(batch().make_microbatch_iterator(microbatch_size=4)), picked(*WHOLE)),
        ("shard", lambda: batch().shard_by_batch_size(2), [picked(0, 1), picked(2, 3)]),
        ("shard groups", lambda: batch().shard_by_batch_size(shards=2, batch_size=2), [picked(0, 2), picked(1, 3)]),
        ("shard unevenly", lambda: batch().slice(0, 3).shard_by_batch_size(2, None, True), [picked(0, 1), picked(2)]),
        ("empty shards", lambda: NESTED.shard_by_batch_size(3, None, True), [{"x": [[1]]}, {"x": []}, {"x": []}]),
        ("kind of shard", lambda: type(batch().shard_by_batch_size(2)[1]), SlicedDataDict),
        ("no indices", lambda: batch().micro_batch_indices, None),
        ("no lengths, no counts", lambda: batch().micro_batch_lengths or batch().elem_counts_per_gb, None),
        ("pack", lambda: get_packer("CONCATENATIVE", 9).pack(LENGTHS), [[0, 1], [2]]),
        ("pack, named", lambda: get_packer("concatenative", 9).pack(sequence_lengths=LENGTHS), [[0, 1], [2]]),
        ("pack nothing", lambda: [get_packer(one, 9, min_bin_count=0).pack([]) for one in ALGORITHMS], [[]] * 4),
    ]
)
def test_value(call, expected):
    """Each function, class and method of a batch has the value that it has in the original."""
    assert plain(call()) == expected


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: RayVirtualCluster([1], num_gpus_per_node=0), ValueError, "num_gpus_per_node"),
        (lambda: RayVirtualCluster([1], node_resource_constraints=[]), ValueError, "node_resource_constraints"),
        (lambda: RayVirtualCluster([1], communication_backend="mpi"), ValueError, "communication_backend"),
        (lambda: RayVirtualCluster([1], gpu_ids=[0, 1]), ValueError, "gpu_ids"),
        (lambda: RayVirtualCluster([-1]), ValueError, "-1"),
        (lambda: get_packer("missing", 10), ValueError, "missing"),
        (lambda: get_packer("concatenative", 10, False), TypeError, "collect_metrics"),
        (lambda: get_packer("concatenative", 10, bin_count_multiple=0), ValueError, "bin_count_multiple"),
        (lambda: get_packer("concatenative", 10, min_bin_count=2).pack([]), ValueError, "2 bins"),
        (lambda: batch().select_indices([-1]), ValueError, "-1"),
        (lambda: batch().chunk(0, 3), ValueError, "chunks"),
        (lambda: batch().slice(0, 5), ValueError, "5"),
        (lambda: join([{"x": [1]}, {"y": [1]}]), ValueError, "differ in keys"),
        (lambda: join(JOINED, {"z": 0}), ValueError, "'z'"),
        (lambda: batch().shard_by_batch_size(2, dynamic_batching_args={**DYNAMIC, "on": 1}), ValueError, "'on'"),
        (lambda: NamedSharding([[0, 1], [2]], ["a", "b"]), ValueError, "Could not create NumPy array from layout"),
        (lambda: NamedSharding([0.5], ["a"]), ValueError, "Layout must contain only integer rank IDs"),
        (lambda: NamedSharding([0], ["a", "b"]), ValueError, "must match"),
        (lambda: NamedSharding([0, 0], ["a"]), ValueError, "Duplicate ranks found"),
        (lambda: GRID.get_worker_coords(9), ValueError, "Worker ID 9 not found in sharding layout"),
        (lambda: GRID.get_ranks(cp=0), ValueError, "Invalid axis name: 'cp'"),
        (lambda: GRID.get_ranks(tp=4), IndexError, "tp"),
        (lambda: GRID.get_axis_index("cp"), ValueError, "Invalid axis name: 'cp'"),
        (lambda: GRID.get_axis_size("cp"), ValueError, "Invalid axis name: 'cp'"),
        (lambda: placement.select_segment_nodes(TOPOLOGY, 4, 4), ResourceInsufficientError, "Cannot form"),
        (lambda: placement.select_segment_nodes(TOPOLOGY, 2, 3), ValueError, "divisible"),
        (lambda: placement.sort_bundle_indices_by_topology(ROWS, 1), ValueError, "gpus_per_node is required"),
        (lambda: ON_ONE(3), TypeError, "3"),
        (lambda: tpu.execute(TpuAcceleratorConfig("v4-8", 2)), ValueError, "autoscale_execute"),
        (lambda: tpu.SlicePoolManager("v4-8").scale_multislice([]), ValueError, "empty"),
        (lambda: tpu.SlicePoolManager("v4-8").scale_multislice(0), ValueError, "0"),
    ],
)
def test_errors(call, error, text):
    """Wrong arguments raise the original's errors."""
    with pytest.raises(error, match=text):
        call()


def test_references(local_ray):
    """A list of references becomes the list of their values."""
    assert tpu.resolve_maybe_refs([ray.put(1), ray.put(2)]) == [1, 2]


def test_mixed_references(local_ray):
    """A list of references and other values is returned as it is."""
    mixed = [ray.put(1), 2]
    assert tpu.resolve_maybe_refs(mixed) == mixed


@pytest.mark.parametrize("args", [DYNAMIC, DynamicBatchingArgs(**DYNAMIC)], ids=["dict", "args"])
def test_dynamic_batching(args):
    """Dynamic batching returns shards and the order, and each shard iterates over microbatches of equal shapes."""
    shards, order = batch().shard_by_batch_size(2, 4, dynamic_batching_args=args)
    assert order == [2, 3, 1, 0]
    for shard, rows in zip(shards, ([2, 3], [1, 0]), strict=True):
        assert plain(shard) == picked(*rows)
        assert (shard.micro_batch_indices, shard.micro_batch_lengths) == ([[[0, 2]]], [[4]])
        assert shard.get_microbatch_iterator_dynamic_shapes_len() == 1
        assert plain(list(shard.make_microbatch_iterator_with_dynamic_shapes())) == [picked(*rows)]
        parts = list(shard.get_batch(0).make_microbatch_iterator_with_dynamic_shapes(sequence_dim=1))
        assert plain(parts) == [picked(*rows)]
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(order)
    assert plain(joined) == picked(*WHOLE)


@pytest.mark.parametrize("args", [PACKED, CAPITALS, SequencePackingArgs(**PACKED)], ids=["dict", "capitals", "args"])
def test_sequence_packing(args):
    """Packing returns shards and the order, and each shard iterates over bins."""
    shards, order = batch().shard_by_batch_size(shards=2, batch_size=4, sequence_packing_args=args)
    assert sum(shard.elem_counts_per_gb[0] for shard in shards) == 4
    for shard in shards:
        ((bins,), (tokens,)) = shard.micro_batch_indices, shard.micro_batch_lengths
        assert shard.get_microbatch_iterator_for_packable_sequences_len() == (len(bins), max(tokens))
        parts = list(shard.get_batch(0).make_microbatch_iterator_for_packable_sequences())
        assert [int(part["length"].sum()) for part in parts] == tokens
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(order)
    assert plain(joined) == picked(*WHOLE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packers(algorithm):
    """Each algorithm packs every sequence once, in bins that are not too full, in the number that is asked for."""
    lengths = [7, 2, 6, 4, 3]
    packer = get_packer(algorithm=algorithm, bin_capacity=10, min_bin_count=3, bin_count_multiple=4)
    assert len(packer.pack(lengths)) == 4
    bins = get_packer(algorithm, 10).pack(lengths)
    assert sorted(index for bin_ in bins for index in bin_) == [0, 1, 2, 3, 4]
    assert max(sum(lengths[index] for index in bin_) for bin_ in bins) <= 10
    with pytest.raises(ValueError):
        get_packer(algorithm, 10).pack([11])


DOCUMENTED = """
    NEMO_RL_PY_EXECUTABLES_SYSTEM NEMO_RL_VENV_DIR NRL_FORCE_REBUILD_VENVS
    NRL_VIRTUAL_CLUSTER_MAX_RETRIES EFORMER_SCALE_RETRY_SLEEP_S EFORMER_SCALE_POLL_S EFORMER_SCALE_ADD_TIMEOUT_S
    EFORMER_HOST_HEALTH_WAIT_S EFORMER_SAFE_GATHER EFORMER_MODERATE EFORMER_KILL_VFIO EFORMER_INSTALL_LSOF
    EFORMER_SUBPROCESS_TIMEOUT_S TPU_NAME RAY_ADDRESS
"""


@pytest.mark.parametrize("name", DOCUMENTED.split())
def test_documented_variables(name):
    """The page about differences names each variable of the originals that is not read, or has another meaning."""
    assert f"`{name}`" in MIGRATION.read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------- the executor on slices


@pytest.fixture(scope="module")
def slices(kept, shared_ray, coordinator_port):
    """Yield two pretend slices of one host each, on a cluster of their own."""
    kept.close()
    shared_ray.end()
    with PretendSlices() as made:
        for _ in range(2):
            made.add_slice(kind="v4-8", topology="2x2x1", workers=[0])
        yield made


@pytest.fixture(scope="module")
def seen(slices):
    """Return the variables on the two slices, slice by slice."""
    config = TpuAcceleratorConfig(tpu_version="v4-8", pod_count=2, execution_env={"env_vars": {"MINE": "1"}})
    function = ray.remote(original_workers.read_environment)
    status = RayExecutor.autoscale_execute(function, config, flatten=False, tag="a")
    assert [[tag for tag, _ in of_slice] for of_slice in status.result] == [["a"], ["a"]]
    return [of_slice[0][1] for of_slice in status.result]


def test_environment_on_slices(slices, seen, coordinator_port):
    """Each host has the variables of its call and its slice, and those of all slices together."""
    assert len({one["MEGASCALE_COORDINATOR_ADDRESS"] for one in seen}) == 1
    for number, (name, one) in enumerate(zip(slices.names(), seen, strict=True)):
        of_call = {"EXECUTOR_CALL_INDEX": "0", "EXECUTOR_CALL_SLICE": str(number), "TPU_HOST_ID": "0", "MINE": "1"}
        of_slice = {"TPU_NAME": name, "TPU_SLICE_NAME": name, "TPU_VERSION": "v4-8", "TPU_POD_COUNT": "2"}
        of_all = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_PORT": coordinator_port, "MEGASCALE_SLICE_ID": str(number)}
        expected = of_call | of_slice | of_all
        assert {key: one.get(key) for key in expected} == expected
        assert one["MEGASCALE_COORDINATOR_ADDRESS"].endswith(f":{coordinator_port}")


@pytest.mark.parametrize(("name", "value"), [("TPU_ZONE", "EMPTY"), ("TPU_NUM_DEVICES", "4")])
def test_more_variables_on_slices(seen, name, value):
    """A zone that is not known is "EMPTY", and each host has the number of its chips."""
    assert [one.get(name) for one in seen] == [value, value]


def test_remote_manager(slices, coordinator_port):
    """A manager keeps its slices, and runs functions and methods on every host, by position and by keyword."""
    options = {"base_env": {"MINE": "2"}, "runtime_env": None, "coord_port": int(coordinator_port)}
    manager = TpuRemoteManager(tpu_version="v4-8", pod_count=2, **options)
    assert (manager.tpu_version, manager.pod_count, manager.runtime_env) == ("v4-8", 2, {})
    with contextlib.closing(manager):
        manager.ensure()
        manager.ensure()
        found = manager.run_function(original_workers.read_environment, "b", flatten=False)
        assert [[(tag, env["MINE"], env["TPU_SLICE_NAME"]) for tag, env in of_slice] for of_slice in found] == [
            [("b", "2", name)] for name in slices.names()
        ]
        keyed = {"cls_obj": Model, "init_args": (), "init_kwargs": {"config": 10}, "method_name": "train"}
        assert manager.run_class_method(**keyed, data=1, steps=3) == [30, 30]
    manager.close()


def test_function_by_keyword(slices):
    """The function of `run_function` can be given by keyword, and its slices by their generation."""
    with contextlib.closing(TpuRemoteManager(tpu_version="v4", pod_count=1)) as manager:
        manager.ensure()
        assert manager.run_function(fn=multiply, x=2) == [2]
        assert manager.run_function(fn=double, x=2) == [(4, 0)]


def test_failure_of_a_function(slices, tmp_path):
    """A function or a method that fails is run once, and its exception is raised."""
    with contextlib.closing(TpuRemoteManager("v4-8", 1, grace_s=0.0)) as manager:
        with pytest.raises(LookupError, match="mine"):
            manager.run_function(FailsOnce(str(tmp_path / "function")).run)
        with pytest.raises(LookupError, match="mine"):
            manager.run_class_method(FailsOnce, (str(tmp_path / "method"),), {}, "run")
    with tpu.SlicePoolManager("v4-8", grace_s=0.0) as manager, pytest.raises(LookupError, match="mine"):
        manager.execute_on_each_host(FailsOnce(str(tmp_path / "of pool")).run)


def test_pool_manager(slices):
    """A pool of slices is scaled to a number or the largest of several, runs functions on all hosts, and is drained."""
    manager = tpu.SlicePoolManager(tpu_type="v4-8", scale_timeout_s=0.0)
    with contextlib.closing(manager.pool):
        with pytest.raises(tpu.InsufficientSlicesError, match="3"):
            manager.scale_multislice(3)
        manager.scale_multislice(num_slices=[1, 2, 3])
        manager.prepare_all_slices()
        assert [type(one) for one in manager.get_all_pool_members()] == [SliceInfo] * 2
        first = manager.get_all_pool_members()[0]
        assert (first.slice_name, first.num_hosts, first.num_accelerators_per_host) == (slices.names()[0], 1, 4)
        assert type(first.ip_address) is str
        assert manager.execute_on_each_host(list_names, a=1) == [[["a"]], [["a"]]]
        manager.scale_multislice(1)
        assert manager.execute_on_each_slice(list_names) == [[]]
        assert manager.execute_on_each_host_flat(list_names) == [[]]
        manager.drain_actor_pool()
        assert manager.get_all_pool_members() == []


def test_variables_of_a_pool_manager(slices):
    """The variables of a call reach the hosts, and not the function; their values may be numbers."""
    manager, env = tpu.SlicePoolManager("v4-8"), {"MINE": 3, "NONE": None}
    read = original_workers.read_environment
    with contextlib.closing(manager.pool):
        manager.scale_multislice(1)
        found = [
            *manager.execute_on_each_slice(read, env),
            *manager.execute_on_each_slice(remote_fn=read, env=env, runtime_env={"env_vars": {"MINE": "1"}}),
            *manager.execute_on_each_host(read, None, env=env)[0],
            *manager.execute_on_each_host_flat(read, env, None),
            *ray.get(manager.schedule_on_each_host(ray.remote(read), env)),
        ]
        assert [(tag, variables["MINE"]) for tag, variables in found] == [(None, "3")] * 5
        assert manager.execute_on_each_host_flat(list_names, runtime_env={"env_vars": {"MINE": "1"}}, x=1) == [["x"]]
