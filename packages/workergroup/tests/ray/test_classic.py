# SPDX-License-Identifier: Apache-2.0
"""The classic calling methods: what they refuse, errors, and lost workers.

`integration-tests/test_original_calls.py` calls each of them in every form.
"""

import asyncio
import collections
import functools
import os
import sys
import time
import types

import numpy as np
import pytest
import ray

from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    RayWorkerBuilder,
    RayWorkerGroup,
    RemoteError,
    WorkerFailureError,
    WorkerGroupError,
)


def decorator(method):
    """Return a decorated method that passes `self` on as a positional argument, as most decorators do."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


class Recorder:
    """A worker that returns its arguments."""

    def echo(self, *args, **kwargs):
        return args, kwargs

    def give(self, data, scale=1):
        return None if data is None else data * scale

    @decorator
    def decorated(self, data, *, scale=1):
        return data * scale

    def rank(self):
        return int(os.environ["RANK"])

    def reserved_names(self, method, worker_idx, run_rank_0_only_axes=None, common_kwargs=None, self_=None):
        return method, worker_idx, run_rank_0_only_axes, common_kwargs

    def fail_unimportable(self):
        module = sys.modules["nowhere_else"] = types.ModuleType("nowhere_else")
        exec("class Unimportable(Exception): pass", module.__dict__)
        raise module.Unimportable("only here")

    def items(self, n, start=0):
        for i in range(n):
            yield start + i

    async def slowly(self, value):
        await asyncio.sleep(0.01)
        return value

    async def slow_items(self, n):
        for i in range(n):
            await asyncio.sleep(0.001)
            yield i

    @staticmethod
    def static(value):
        return value

    @classmethod
    def of_class(cls, value):
        return cls.__name__, value

    def child_and_own_group(self):
        def mine():
            return ray.util.get_current_placement_group().id.hex()

        return mine(), ray.get(ray.remote(num_cpus=0)(mine).remote())

    def sleep(self, seconds):
        time.sleep(seconds)

    def die(self):
        os._exit(1)

    def _private(self):
        return "never called"


AXES = NamedSharding.from_shape(dp=2, tp=4)
OVER_DP = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}
SHARED = (Recorder, AXES)


class TestArguments:
    @pytest.mark.parametrize(
        ("rank", "error", "message"),
        [
            (-1, IndexError, "worker_idx -1 is out of range: the group has ranks 0 to 7"),
            (8, IndexError, "worker_idx 8 is out of range"),
            *((rank, TypeError, "worker_idx must be an int") for rank in ("0", 1.0, True, None)),
        ],
    )
    def test_bad_ranks(self, group, rank, error, message):
        """What is no rank of the group is refused with the valid range."""
        with pytest.raises(error, match=message):
            group.run_single_worker_single_data("rank", rank)

    @pytest.mark.smoke
    def test_methods_of_every_kind(self, group):
        """Plain, static, class and async methods return results alike; async methods run to their end."""
        for method, answer in [("slowly", 3), ("static", 3), ("of_class", ("Recorder", 3)), ("decorated", 3)]:
            assert group.get_all_worker_results(group.run_all_workers_single_data(method, 3)) == [answer] * 8
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            group.call("decorated", 3, 4).result()

    def test_parameters_with_names_of_options(self, group):
        """A method may have parameters with Fairlead's names, given by position or as common arguments."""
        ref = group.run_single_worker_single_data("reserved_names", 0, "m", 3, ["tp"], common_kwargs={"a": 1})
        assert ray.get(ref) == ("m", 3, ["tp"], {"a": 1})
        refs = group.run_all_workers_single_data("reserved_names", method="m", worker_idx=4)
        assert ray.get(refs[0]) == ("m", 4, None, None)
        future = group.run_all_workers_sharded_data(
            "reserved_names",
            method=["a", "b"],
            common_kwargs={"worker_idx": 1, "run_rank_0_only_axes": 2, "common_kwargs": 3},
            **OVER_DP,
        )
        assert group.get_all_worker_results(future)[4] == ("b", 1, 2, 3)

    def test_arrays_and_series_are_lists(self, group):
        """The first dim of an array, or a pandas Series, which has keys, has a value for each worker."""

        class Series(collections.UserList):
            def keys(self):
                return range(len(self))

        for values in (np.arange(8), Series(range(8))):
            refs = group.run_all_workers_multiple_data("give", values)
            assert group.get_all_worker_results(refs) == list(range(8))

    @pytest.mark.parametrize("name", ["nothing", "_private", "__init__", "calls"])
    def test_unknown_method(self, group, requests, name):
        """A name that is not a public method is refused with a list of the public methods."""
        for call in (
            lambda: group.run_single_worker_single_data(name, 0),
            lambda: group.run_all_workers_single_data(name),
            lambda: group.run_all_workers_multiple_data(name, [0] * 8),
            lambda: group.run_all_workers_sharded_data(name),
        ):
            with pytest.raises(AttributeError, match=rf"Recorder has no public method '{name}'; it has \['child"):
                call()
        assert requests == []


class TestErrors:
    def test_class_that_the_driver_cannot_import(self, group):
        """An exception whose class cannot be imported here arrives as RemoteError, with its name and traceback."""
        with pytest.raises(RemoteError, match="only here") as caught:
            group.get_all_worker_results([group.run_single_worker_single_data("fail_unimportable", 5)])
        assert (caught.value.rank, caught.value.type_name) == (5, "nowhere_else.Unimportable")
        assert "fail_unimportable" in caught.value.remote_traceback
        call = group.call("fail_unimportable")
        assert call.wait(60)
        with pytest.raises(RemoteError) as caught:
            call.result()
        assert [note.rpartition(": ")[2] for note in caught.value.__notes__[1:]] == ["Unimportable"] * 7


def test_handles_are_ordinary(group):
    """`group.workers[i]` is a Ray handle with the class's own methods, whose generators stream."""
    assert ray.get(group.workers[2].echo.remote(1, timeout=4, method="m")) == ((1,), {"timeout": 4, "method": "m"})
    assert [ray.get(ref) for ref in group.workers[0].items.remote(3, start=5)] == [5, 6, 7]
    assert [ray.get(ref) for ref in group.workers[1].slow_items.remote(3)] == [0, 1, 2]


def test_children_of_workers(group):
    """The actors and tasks of a worker run in its placement group, as engines with their own workers need."""
    refs = group.run_all_workers_single_data("child_and_own_group")
    parents, children = zip(*group.get_all_worker_results(refs), strict=True)
    assert len(set(parents)) == 1
    assert children == parents


def test_a_killed_worker(cluster, capsys, requests):
    """A lost worker soon raises a WorkerFailureError with its rank and node; later calls are refused at once."""
    axes = NamedSharding.from_shape(dp=1, tp=3)
    with RayWorkerGroup(cluster, RayWorkerBuilder(Recorder), [3], sharding_annotations=axes) as group:
        future = group.run_all_workers_single_data("rank")
        ray.wait(future, num_returns=3)
        group.run_single_worker_single_data("die", 1)
        with pytest.raises(WorkerFailureError, match=r"rank 1 \(dp=0, tp=1\) on node .*: killed"):
            group.get_all_worker_results(group.run_all_workers_single_data("rank"))
        assert group.get_all_worker_results(future) == [0, 1, 2]
        requests.clear()
        with pytest.raises(WorkerFailureError, match="rank 1"):
            group.run_all_workers_single_data("rank")
        assert requests == []
        assert ray.get(group.run_single_worker_single_data("rank", 2)) == 2
        assert [worker["state"] for worker in group.worker_metadata] == ["alive", "dead", "alive"]
        cluster.print_cluster_grid(group)
        shown = capsys.readouterr().out.rpartition("Ray Cluster:")[2]
        assert ("W 1" in shown, shown.count("dead"), shown.count("alive")) == (True, 1, 0)


def test_shutdown_with_a_call(cluster):
    """A call that a shutdown has interrupted raises that its workers were lost; a later one is refused."""
    with RayWorkerGroup(cluster, Recorder, workers_per_node=1) as group:
        futures = group.run_all_workers_single_data("sleep", 600)
        group.shutdown()
        with pytest.raises(WorkerFailureError, match=r"rank 0 .*: shut-down"):
            group.get_all_worker_results(futures)
        with pytest.raises(WorkerGroupError, match="it has been shut down"):
            group.run_all_workers_single_data("rank")
