# SPDX-License-Identifier: Apache-2.0
"""Tests of the packages together on one node: reserve slots, start a group, call it, show it and shut it down."""

import numpy as np
import pytest
import ray

from fairlead_placement import PlacementError, RayVirtualCluster
from fairlead_placement.testing import assert_no_leaks
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError


class Model:
    """A worker that holds one tensor-parallel part of a vector."""

    def __init__(self, size: int) -> None:
        self.size = size

    def load(self, part: np.ndarray) -> None:
        self.part = part

    def dot(self, x: np.ndarray, columns: slice) -> float:
        return float(self.part @ x[columns])

    def gpu(self) -> tuple[str, list[str]]:
        import os

        return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def die(self) -> None:
        import os

        os._exit(1)


@pytest.mark.smoke
def test_sharded_dot_product(local_ray):
    """With weights sharded over tp and data over dp, the partial results add up to the full dot products."""
    weights, batch = np.arange(8.0), [np.ones(8), np.full(8, 2.0)]
    axes = NamedSharding.from_shape(dp=2, tp=4)
    columns = [slice(2 * t, 2 * t + 2) for t in range(4)]
    with assert_no_leaks(), RayVirtualCluster([4, 4], use_gpus=False, name="road") as cluster:
        builder = RayWorkerBuilder(Model, 8)
        with RayWorkerGroup(cluster, builder, name_prefix="model", sharding_annotations=axes) as group:
            load = group.run_all_workers_sharded_data(
                "load", [weights[c] for c in columns], in_sharded_axes=["tp"], replicate_on_axes=["dp"]
            )
            assert group.get_all_worker_results(load) == [None] * 8
            nested = [[(x, c) for c in columns] for x in batch]
            future = group.run_all_workers_sharded_data(
                "dot",
                x=[[x for x, _ in row] for row in nested],
                columns=[[c for _, c in row] for row in nested],
                in_sharded_axes=["dp", "tp"],
            )
            parts = np.array(group.get_all_worker_results(future)).reshape(2, 4)
            assert parts.sum(axis=1).tolist() == [28.0, 56.0]
            assert [worker["node_idx"] for worker in group.worker_metadata] == [0] * 4 + [1] * 4


@pytest.mark.smoke
def test_each_worker_has_its_own_gpu(local_ray):
    """Rank r sees exactly the logical GPU of slot r, and the slots are in ascending order of GPUs."""
    with RayVirtualCluster([4]) as cluster, RayWorkerGroup(cluster, RayWorkerBuilder(Model, 1)) as group:
        assert [slot.accelerator_ids for slot in cluster.slots()] == [("0",), ("1",), ("2",), ("3",)]
        assert ray.get([worker.gpu.remote() for worker in group.workers]) == [(str(i), [str(i)]) for i in range(4)]


def test_grid_of_two_groups(local_ray, capsys):
    """The global view shows both groups in their slots, and the view of one cluster shows one group."""
    with (
        RayVirtualCluster([2, 1], use_gpus=False, enable_colocation=True) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Model, 1), name_prefix="policy") as policy,
        RayWorkerGroup(cluster, RayWorkerBuilder(Model, 1), [1, 0], name_prefix="generation"),
    ):
        cluster.print_all_worker_groups()
        output = capsys.readouterr().out
        assert "Ray Cluster Global View: 2 nodes, 3 CPUs, Worker Groups: 2" in output
        assert [word for word in output.split() if word.startswith("G") and "W" in word][:4] == [
            "G0:W0",
            "G0:W1",
            "G1:W0",
            "G0:W2",
        ]
        assert "of policy (3 workers)" in output
        assert "of generation (1 worker)" in output
        cluster.print_cluster_grid(policy)
        output = capsys.readouterr().out
        assert "Ray Cluster: 2 nodes, 3 CPUs" in output
        assert "W 2" in output


def test_cluster_serves_another_group_after_a_worker_dies(local_ray):
    """After a group with a dead worker is shut down, another group can use its cluster."""
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        with (
            RayWorkerGroup(cluster, RayWorkerBuilder(Model, 1)) as group,
            pytest.raises(WorkerFailureError, match="rank 1"),
        ):
            group.get_all_worker_results([group.run_single_worker_single_data("die", 1)])
        with RayWorkerGroup(cluster, RayWorkerBuilder(Model, 1)) as group:
            group.get_all_worker_results(group.run_all_workers_single_data("load", np.ones(1)))


def test_unified_reservation_needs_separate_nodes(local_ray):
    """A unified reservation of several logical nodes fails on one physical node."""
    cluster = RayVirtualCluster([1, 1], use_gpus=False)
    with pytest.raises(PlacementError, match="each logical node on a physical node of its own"), assert_no_leaks():
        cluster.reserve(unified=True)
