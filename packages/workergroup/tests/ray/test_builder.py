# SPDX-License-Identifier: Apache-2.0
"""Tests of builders: one worker at a time, and the decisions of a class's `configure_worker`."""

import os

import pytest
import ray

from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerStartError

from ..faults import limit_starts_of_single_workers


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


def test_wrong_result_of_configure_worker(cluster):
    """A result without three or four parts is refused, wherever the class is inspected."""
    with pytest.raises(TypeError, match="configure_worker must return"):
        RayWorkerGroup(cluster, Wrong)
    with pytest.raises(WorkerStartError, match="configure_worker must return"):
        RayWorkerGroup(cluster, f"{Wrong.__module__}.Wrong")


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
        first = RayWorkerBuilder(Plain, 1)(group, 1, 0)
        limit_starts_of_single_workers(monkeypatch, 2.0)
        with pytest.raises(WorkerStartError, match=r"has not finished after 2 s: .* bundle 1 has no room"):
            RayWorkerBuilder(Plain, 1)(group, 1, 0)
        ray.kill(first)

    def test_constructor_fails(self, cluster):
        """The constructor's exception is raised, and nothing is left behind."""
        (group,) = cluster.get_placement_groups()
        with pytest.raises(TypeError, match="can only concatenate str"):
            RayWorkerBuilder(Plain, "a")(group, 0, 0)
