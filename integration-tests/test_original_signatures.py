# SPDX-License-Identifier: Apache-2.0
"""Tests that the public functions accept the parameters of the original systems, NeMo RL and eray.

Each row is one function of an original system at the commit that docs/migration.md names, with its parameters in order
and their defaults. Fairlead's function must accept the same parameters by keyword and in the same order. `DIFFERENT`
lists the intended differences, as docs/migration.md does.
"""

import inspect
import typing

import pytest

import fairlead_batching as batching
import fairlead_placement as placement
import fairlead_sharding as sharding
import fairlead_tpu_executor as tpu
import fairlead_venvs as venvs
import fairlead_workergroup as workergroup

Cluster, Group, Grid = placement.RayVirtualCluster, workergroup.RayWorkerGroup, sharding.NamedSharding
BIG = 1_000_000

# (Fairlead's function, parameters without a default, parameters with their default)
ORIGINAL = [
    (
        Cluster,
        "bundle_ct_per_node_list",
        {
            "use_gpus": True,
            "max_colocated_worker_groups": 1,
            "num_gpus_per_node": 8,
            "name": "",
            "placement_group_strategy": "SPREAD",
            "port_range_low": None,
            "port_range_high": None,
            "segment_size": None,
            "node_resource_constraints": None,
        },
    ),
    (Cluster.get_placement_groups, "self", {}),
    (Cluster.world_size, "self", {}),
    (Cluster.node_count, "self", {}),
    (Cluster.get_available_address_and_port, "self pg_idx bundle_idx", {}),
    (Cluster.get_available_addresses_and_ports_batch, "self pg_bundle_pairs", {"batch_size": 256}),
    (Cluster.get_master_address_and_port, "self", {}),
    (Cluster.shutdown, "self", {}),
    (placement.init_ray, "", {"log_dir": None}),
    (placement.select_segment_nodes, "topology segment_size num_nodes", {}),
    (
        placement.sort_bundle_indices_by_topology,
        "bundle_data",
        {"segment_size": None, "gpus_per_node": None},
    ),
    (
        Group,
        "cluster remote_worker_builder",
        {
            "workers_per_node": None,
            "name_prefix": "",
            "bundle_indices_list": None,
            "sharding_annotations": None,
            "env_vars": {},
        },
    ),
    (Group.get_dp_leader_worker_idx, "self dp_shard_idx", {}),
    (Group.run_single_worker_single_data, "self method_name worker_idx", {}),
    (
        Group.run_all_workers_single_data,
        "self method_name",
        {"run_rank_0_only_axes": None},
    ),
    (
        Group.run_all_workers_multiple_data,
        "self method_name",
        {"run_rank_0_only_axes": None, "common_kwargs": None},
    ),
    (
        Group.run_all_workers_sharded_data,
        "self method_name",
        {
            "in_sharded_axes": None,
            "replicate_on_axes": None,
            "output_is_replicated": None,
            "make_dummy_calls_to_free_axes": False,
            "common_kwargs": None,
        },
    ),
    (Group.get_all_worker_results, "self future_bundle", {"return_generators_as_proxies": False}),
    (Group.shutdown, "self", {"cleanup_method": None, "timeout": 30.0, "force": False}),
    (workergroup.RayWorkerBuilder, "ray_actor_class_fqn", {}),
    (
        workergroup.RayWorkerBuilder.create_worker_async,
        "self placement_group placement_group_bundle_index num_gpus",
        {"bundle_indices": None},
    ),
    (
        workergroup.RayWorkerBuilder.__call__,
        "self placement_group placement_group_bundle_index num_gpus",
        {"bundle_indices": None},
    ),
    (workergroup.MultiWorkerFuture, "futures", {"return_from_workers": None, "called_workers": None}),
    (
        workergroup.MultiWorkerFuture.get_results,
        "self worker_group",
        {"return_generators_as_proxies": False},
    ),
    (workergroup.recursive_merge_options, "default_options extra_options", {}),
    (Grid, "layout names", {}),
    (Grid.get_worker_coords, "self worker_id", {}),
    (Grid.is_axis_zero, "coords axes", {}),
    (Grid.get_axis_index, "self name", {}),
    (Grid.get_axis_size, "self name", {}),
    (venvs.create_local_venv, "py_executable venv_name", {"force_rebuild": False}),
    (venvs.create_local_venv_on_each_node, "py_executable venv_name", {}),
    (venvs.make_actor_runtime_env, "actor_class_fqn", {}),
    (venvs.get_actor_python_env, "actor_class_fqn", {}),
    (
        batching.get_packer,
        "algorithm bin_capacity",
        {"collect_metrics": False, "min_bin_count": None, "bin_count_multiple": None},
    ),
    (tpu.RayExecutor.execute, "remote_fn accelerator_config", {}),
    (tpu.RayExecutor.autoscale_execute, "remote_fn accelerator_config", {"flatten": True}),
    (
        tpu.RayExecutor.execute_resumable,
        "remote_fn accelerator_config",
        {"max_retries_preemption": BIG, "max_retries_failure": 10},
    ),
    (
        tpu.RayExecutor.autoscale_execute_resumable,
        "remote_fn accelerator_config",
        {"max_retries_preemption": BIG, "max_retries_failure": 10},
    ),
    *(
        (decorator, "accelerator_config", {})
        for decorator in (
            tpu.execute,
            tpu.execute_resumable,
            tpu.autoscale_execute,
            tpu.autoscale_execute_resumable,
        )
    ),
]

# (Fairlead's function, parameter): Fairlead's default, or `empty` if the parameter is missing.
DIFFERENT = {
    ("RayVirtualCluster", "placement_group_strategy"): "STRICT_PACK",
    ("RayWorkerGroup", "env_vars"): None,
    ("get_packer", "collect_metrics"): inspect.Parameter.empty,
    # None stands for the value in the configuration, whose defaults are those of the original.
    ("autoscale_execute", "flatten"): None,
    **{
        (name, parameter): None
        for name in ("execute_resumable", "autoscale_execute_resumable")
        for parameter in ("max_retries_preemption", "max_retries_failure")
    },
}

# The attributes that programs read from the objects of the original systems.
ATTRIBUTES = [
    (
        Cluster,
        (
            "use_gpus max_colocated_worker_groups num_gpus_per_node name placement_group_strategy port_range_low "
            "port_range_high segment_size node_resource_constraints"
        ),
    ),
    (Grid, "shape names ndim size layout get_ranks get_ranks_by_coord"),
    (workergroup.RayWorkerBuilder, "ray_actor_class_fqn args kwargs"),
    (workergroup.MultiWorkerFuture, "futures return_from_workers called_workers"),
]


@pytest.mark.parametrize(("ours", "required", "optional"), ORIGINAL, ids=lambda one: getattr(one, "__qualname__", ""))
def test_signature(ours, required, optional):
    """Each function accepts the original's parameters in order, with the same defaults or a listed difference."""
    parameters = inspect.signature(ours).parameters
    name = ours.__name__
    for parameter in required.split():
        assert parameters[parameter].kind is not inspect.Parameter.POSITIONAL_ONLY or parameter == "self", parameter
    differing = {}
    for parameter, default in optional.items():
        own = parameters[parameter].default if parameter in parameters else inspect.Parameter.empty
        if own != default:
            differing[name, parameter] = own
    listed = {key: value for key, value in DIFFERENT.items() if key[0] == name and key[1] in optional}
    assert differing == listed
    # Parameters after *args are keyword-only in the original too.
    missing = {parameter for (of, parameter) in differing if parameter not in parameters and of == name}
    order = [one for one in (*required.split(), *optional) if one not in missing]
    assert [one for one in parameters if one in order] == order


@pytest.mark.parametrize(("ours", "names"), ATTRIBUTES, ids=lambda one: getattr(one, "__qualname__", ""))
def test_attributes(ours, names):
    """Each object has the attributes that programs read from the original's objects."""
    instance = {
        Cluster: lambda: Cluster([1], use_gpus=False),
        Grid: lambda: Grid([0, 1], ["dp"]),
        workergroup.RayWorkerBuilder: lambda: workergroup.RayWorkerBuilder("collections.Counter"),
        workergroup.MultiWorkerFuture: lambda: workergroup.MultiWorkerFuture([]),
    }[ours]()
    assert [name for name in names.split() if not hasattr(instance, name)] == []


def test_flat_keywords():
    """A group accepts the keywords for restarts, balancing and compression, and no others beside its parameters."""
    flat = typing.get_args(inspect.signature(Group).parameters["flat"].annotation)[0]
    assert set(flat.__annotations__) == {
        "restart_on_failure",
        "max_restarts",
        "enable_load_balancing",
        "load_balancing_strategy",
        "enable_gradient_compression",
    }
