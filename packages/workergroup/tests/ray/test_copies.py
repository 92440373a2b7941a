# SPDX-License-Identifier: Apache-2.0
"""Tests of the values that a call stores, and of values that go from worker to worker."""

import gc
import weakref

import numpy as np
import pytest
import ray
from ray.experimental.locations import get_local_object_locations

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import PerWorker, RayWorkerBuilder, RayWorkerGroup, Shard

from ..calling import MB


class TestCopies:
    """Each distinct value is stored once, and only wanted results are."""

    def test_one_put_per_distinct_value(self, group, puts, requests):
        """An object is stored once over all arguments, and each worker reads the one copy."""
        a, b = np.zeros(MB), np.ones(MB)
        group.call("echo", a, Shard([a, b], "dp"), PerWorker([b] * 8), same=a, discard=True).result()
        assert (len(puts), requests) == (2, ["echo"] * 8)
        assert 16 * MB <= sum(puts) < 16.1 * MB

    def test_only_collected_answers_are_stored(self, group):
        """When two of eight workers return 8 MB each, the others return nothing."""
        call = group.call("make", 8, collect="dp")
        assert [value[0] for value in call.result()] == [5.0, 0.0]
        told = get_local_object_locations(call.refs).values()
        assert 16 * MB <= sum(one["object_size"] for one in told) < 16.1 * MB
        silent = [at for at, rank in enumerate(call.called_workers) if rank not in (0, 5)]
        assert ray.get([call.futures[at] for at in silent]) == [None] * 6

    def test_results_of_a_call_as_pieces(self, group, puts):
        """The results of a call are passed on as shards, one to each worker, or as one list."""
        made = group.call("make", 1, collect="dp")
        each = MB // 8
        assert group.call("total", Shard(made, "dp"), collect="dp").result() == [5.0 * each, 0.0]
        assert group.call("total", made).result() == [5.0 * each] * 8
        assert group.call("total", value=made, collect=()).result() == 5.0 * each
        made = group.call("make", 1)
        assert group.call("total", PerWorker(made)).result() == [each * float(rank) for rank in range(8)]
        assert group.call("total", made, discard=True).result() is None
        assert group.at(dp=0, tp=0).call("gathered_items", made).result()[0][3].tolist()[:1] == [3.0]
        assert puts == []

    def test_calls_that_cannot_be_passed_on(self, group):
        """A call without results, with one in place of several, or with items is refused with the reason."""
        with pytest.raises(ValueError, match="no result to pass on"):
            group.call("echo", group.call("rank", discard=True))
        with pytest.raises(ValueError, match="has one result"):
            group.call("echo", Shard(group.call("rank", collect=()), "dp"))
        with pytest.raises(ValueError, match="4 results, but 2 pieces"):
            group.call("echo", Shard(group.call("rank", collect="tp"), "dp"))
        with pytest.raises(TypeError, match="is a generator method"):
            group.call("echo", group.call("items", 2))

    def test_an_error_in_an_argument(self, group):
        """A call whose argument has failed raises that error with its type."""
        with pytest.raises(ValueError, match="would not"):
            group.call("echo", group.call("fail", [5], collect=())).result()


class Weighted:
    """A worker with a large argument."""

    def __init__(self, weights):
        self.total = float(weights.sum())


def test_driver_keeps_no_arguments(local_ray):
    """Once the arguments of the constructor are stored, the driver does not keep the originals."""
    weights = np.ones(MB)
    kept = weakref.ref(weights)
    builder = RayWorkerBuilder(Weighted, weights)
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, builder):
        del builder, weights
        gc.collect()
        assert kept() is None
