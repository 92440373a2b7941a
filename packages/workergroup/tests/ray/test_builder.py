# SPDX-License-Identifier: Apache-2.0
"""Tests of builders: one worker at a time, and the decisions of a class's `configure_worker`."""

import os

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerStartError

from ..faults import limit_starts_of_single_workers


class Configured:
    """A worker whose `configure_worker` returns its arguments through every channel."""

    def __init__(self, seed=0, asked=None):
        self.seed, self.asked = seed, asked

    @staticmethod
    def configure_worker(num_gpus, bundle_indices, num_gpus_per_node):
        resources = {"num_gpus": num_gpus / 2}
        env_vars = {"ASKED": f"{num_gpus} {num_gpus_per_node}", "LOCAL_RANK": "0"}
        if bundle_indices is None:
            return resources, env_vars, {}
        init_kwargs = {"seed": sum(bundle_indices[1]), "asked": bundle_indices}
        return resources, env_vars, init_kwargs, {"env_vars": {"OVERRIDE": "1"}}

    def read_identity(self):
        env = {name: os.environ.get(name) for name in ("ASKED", "LOCAL_RANK", "OVERRIDE", "RANK")}
        return self.seed, self.asked, env, ray.get_runtime_context().get_assigned_resources().get("GPU")


class Three:
    """A worker with the short form of `configure_worker`: two parameters, three results."""

    def __init__(self, tag="unset"):
        self.tag = tag

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return None, {"TAG": "x"}, {"tag": f"{num_gpus} {bundle_indices}"}

    def read_identity(self):
        return self.tag, os.environ["TAG"]


class Wrong:
    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return {}


class Plain:
    def __init__(self, a, b=2):
        self.sum = a + b

    def total(self):
        return self.sum, os.environ.get("GIVEN")

    def items(self, n):
        yield from range(n)


def read_identity(group):
    return group.get_all_worker_results(group.run_all_workers_single_data("read_identity"))


class TestConfigureWorker:
    def test_four_results(self, local_ray, caplog):
        """It sets resources, variables, constructor arguments and runtime_env; only leaders get bundles."""
        with (
            RayVirtualCluster([3], num_gpus_per_node=6) as cluster,
            RayWorkerGroup(
                cluster,
                Configured,
                bundle_indices_list=[(0, [0, 1]), (0, [2])],
                env_vars={"OVERRIDE": "user"},
            ) as group,
        ):
            answers = read_identity(group)
        env = {"ASKED": "1.0 6", "LOCAL_RANK": "0"}
        assert answers[0] == (1, (0, [0, 1]), {**env, "OVERRIDE": "1", "RANK": "0"}, 0.5)
        assert answers[1] == (0, None, {**env, "OVERRIDE": "user", "RANK": "1"}, 0.5)
        assert answers[2] == (2, (0, [2]), {**env, "OVERRIDE": "1", "RANK": "2"}, 0.5)
        assert "configure_worker overrides LOCAL_RANK for rank 1" in caplog.messages
        assert "configure_worker overrides LOCAL_RANK, OVERRIDE for rank 0" in caplog.messages

    def test_three_results(self, cluster):
        """For a class that is given by its full name it runs on the workers' side, without overrides."""
        with RayWorkerGroup(cluster, f"{Three.__module__}.Three", workers_per_node=2) as group:
            assert read_identity(group) == [("0 (0, [0])", "x"), ("0 (0, [1])", "x")]

    def test_wrong_result(self, cluster):
        """Any other result is refused, wherever the class is inspected."""
        with pytest.raises(TypeError, match="configure_worker must return"):
            RayWorkerGroup(cluster, Wrong)
        with pytest.raises(WorkerStartError, match="configure_worker must return"):
            RayWorkerGroup(cluster, f"{Wrong.__module__}.Wrong")

    def test_more_than_the_slot_holds(self, cluster):
        """Resources that the bundle cannot hold are refused before any worker is launched."""

        class Greedy:
            @staticmethod
            def configure_worker(num_gpus, bundle_indices):
                return {"num_gpus": 1}, {}, {}

        with pytest.raises(ValueError, match="A worker requests 1 GPU, but its bundle holds 0"):
            RayWorkerGroup(cluster, Greedy)


class TestOneWorker:
    def test_call(self, cluster):
        """A builder makes one worker in a bundle, and returns its handle when it is ready."""
        (group,) = cluster.get_placement_groups()
        worker = RayWorkerBuilder(Plain, 1, b=3)(group, 5, 0, runtime_env={"env_vars": {"GIVEN": "1"}}, name="mine")
        assert ray.get(worker.total.remote()) == (4, "1")
        assert [ray.get(item) for item in worker.items.remote(3)] == [0, 1, 2]
        assert ray.get(ray.get_actor("mine").total.remote()) == (4, "1")
        ray.kill(worker)

    def test_no_room(self, cluster, monkeypatch):
        """A worker whose bundle has no room for it is killed at its deadline."""
        (group,) = cluster.get_placement_groups()
        first = RayWorkerBuilder(Configured)(group, 1, 0)
        limit_starts_of_single_workers(monkeypatch, 2.0)
        with pytest.raises(WorkerStartError, match=r"has not finished after 2 s: .* bundle 1 has no room"):
            RayWorkerBuilder(Configured)(group, 1, 0)
        ray.kill(first)

    def test_async(self, local_ray):
        """`create_worker_async` returns at once with a ref to wait for, and calls `configure_worker`."""
        with RayVirtualCluster([2]) as cluster:
            (group,) = cluster.get_placement_groups()
            ready, worker = RayWorkerBuilder(Configured).create_worker_async(group, 1, 1.0, (0, [1]))
            assert ray.get(ready) == worker
            seed, asked, _, gpus = ray.get(ray.get(ready).read_identity.remote())
            assert (seed, asked, gpus) == (1, (0, [1]), 0.5)
            ray.kill(worker)

    def test_constructor_fails(self, cluster):
        """The constructor's exception is raised, and nothing is left behind."""
        (group,) = cluster.get_placement_groups()
        with pytest.raises(TypeError, match="can only concatenate str"):
            RayWorkerBuilder(Plain, "a")(group, 0, 0)

    def test_attributes(self):
        """The class's name and the arguments are kept."""
        builder = RayWorkerBuilder(Plain, 1, b=2)
        assert builder.ray_actor_class_fqn == f"{Plain.__module__}.Plain"
        assert (builder.args, builder.kwargs) == ((1,), {"b": 2})
        assert RayWorkerBuilder("a.b.C").ray_actor_class_fqn == "a.b.C"
        assert RayWorkerBuilder(ray.remote(Plain)).ray_actor_class_fqn == f"{Plain.__module__}.Plain"
