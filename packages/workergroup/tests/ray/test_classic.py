# SPDX-License-Identifier: Apache-2.0
"""The classic calling methods: what they refuse, stored values, errors, order, and lost workers.

`integration-tests/test_original_calls.py` calls each of them in every form.
"""

import asyncio
import collections
import functools
import os
import re
import sys
import time
import types

import numpy as np
import pytest
import ray

from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    MultiWorkerFuture,
    RayWorkerBuilder,
    RayWorkerGroup,
    RemoteError,
    WorkerFailureError,
    WorkerGroupError,
)


class OddError(ValueError):
    """An exception with two arguments, as exceptions that pickle badly have."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)
        self.number = number


def decorator(method):
    """Return a decorated method that passes `self` on as a positional argument, as most decorators do."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


class Recorder:
    """A worker that returns its arguments and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def echo(self, *args, **kwargs):
        self.calls += 1
        return args, kwargs

    def give(self, data, scale=1):
        self.calls += 1
        return None if data is None else data * scale

    @decorator
    def decorated(self, data, *, scale=1):
        return data * scale

    def count(self):
        return self.calls

    def rank(self):
        return int(os.environ["RANK"])

    def address_of(self, value):
        """Return which copy of the value this worker reads."""
        return value.ctypes.data, value.flags.writeable, float(value.sum())

    def reserved_names(self, method, worker_idx, run_rank_0_only_axes=None, common_kwargs=None, self_=None):
        return method, worker_idx, run_rank_0_only_axes, common_kwargs

    def fail(self, ranks):
        if int(os.environ["RANK"]) in ranks:
            raise OddError("odd", 7)

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


def calls(group: RayWorkerGroup) -> list[int]:
    return group.get_all_worker_results(group.run_all_workers_single_data("count"))


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

    def test_values_that_fit_no_worker(self, group):
        """Too few or too many values, what is no list, and a name given twice are refused, and no worker is called."""
        before = calls(group)
        for count in (0, 7, 9):
            with pytest.raises(ValueError, match=f"argument 'data' of 'give': it has {count} values, but 8 workers"):
                group.run_all_workers_multiple_data("give", [0] * count)
        for values in ("abcdefgh", {"a": 1}, 3):
            with pytest.raises(TypeError, match="must be a list with a value per worker called"):
                group.run_all_workers_multiple_data("give", data=values)
        with pytest.raises(ValueError, match=r"\['data'\] are given both per worker and in common_kwargs"):
            group.run_all_workers_multiple_data("give", data=[0] * 8, common_kwargs={"data": 1})
        assert calls(group) == before

    @pytest.mark.parametrize(
        ("pieces", "message"),
        [
            (["a"], "depth 0, axis 'dp' (pieces): expected 2, found 1"),
            (["a", "b", "c"], "depth 0, axis 'dp' (pieces): expected 2, found 3"),
            ([["a"] * 4, ["b"] * 3], "depth 1, axis 'tp' (pieces[1]): expected 4, found 3"),
        ],
    )
    def test_wrong_number_of_pieces(self, group, pieces, message):
        """Too few or too many pieces, at any depth, are refused before any worker is called."""
        before = calls(group)
        axes = ["dp", "tp"] if isinstance(pieces[0], list) else ["dp"]
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            group.run_all_workers_sharded_data("give", data=pieces, in_sharded_axes=axes)
        assert str(caught.value).startswith("argument 'data' of 'give': ")
        assert calls(group) == before

    @pytest.mark.parametrize("name", ["nothing", "_private", "__init__", "calls"])
    def test_unknown_method(self, group, requests, name):
        """A name that is not a public method is refused with a list of the public methods."""
        for call in (
            lambda: group.run_single_worker_single_data(name, 0),
            lambda: group.run_all_workers_single_data(name),
            lambda: group.run_all_workers_multiple_data(name, [0] * 8),
            lambda: group.run_all_workers_sharded_data(name),
        ):
            with pytest.raises(AttributeError, match=rf"Recorder has no public method '{name}'; it has \['address_of'"):
                call()
        assert requests == []

    def test_arguments_the_method_does_not_take(self, group):
        """Missing, unknown and surplus arguments are refused as the method itself would, and no worker is called."""
        before = calls(group)
        with pytest.raises(TypeError, match=r"give.*missing a required argument: 'data'"):
            group.run_all_workers_single_data("give")
        with pytest.raises(TypeError, match="unexpected keyword argument 'sale'"):
            group.run_all_workers_single_data("give", 1, sale=2)
        with pytest.raises(TypeError, match="too many positional arguments"):
            group.run_single_worker_single_data("rank", 0, 1)
        assert calls(group) == before


class TestStoredValues:
    def test_one_put_for_all_workers(self, group, puts):
        """A large value is stored once, and all workers read the one copy in place."""
        value = np.ones(4_000_000)  # 32 MB
        seen = group.get_all_worker_results(group.run_all_workers_single_data("address_of", value))
        assert len(puts) == 1
        assert {(writeable, total) for _, writeable, total in seen} == {(False, 4_000_000.0)}

    def test_refs_are_passed_through(self, group, puts):
        """An ObjectRef as a piece reaches the worker as its value, without a put or a fetch."""
        refs = [ray.put("a"), ray.put("b")]
        puts.clear()
        future = group.run_all_workers_sharded_data("give", refs, **OVER_DP)
        assert puts == []
        assert group.get_all_worker_results(future) == ["a"] * 4 + ["b"] * 4


class TestErrors:
    def test_type_is_kept(self, group):
        """A worker's exception is raised with its own type and arguments, also if its result is not wanted."""
        silent = {"output_is_replicated": ["tp"], "in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}
        for future in (
            group.run_all_workers_single_data("fail", [6]),
            group.run_all_workers_sharded_data("fail", [[6], [6]], **silent),
        ):
            with pytest.raises(OddError) as caught:
                group.get_all_worker_results(future)
            assert (type(caught.value), caught.value.number) == (OddError, 7)
            assert caught.value.__notes__[0].startswith("raised by rank 6 (dp=1, tp=2) on node ")
            assert "OddError" in str(caught.value.__cause__)

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

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"called_workers": [1]}, "2 futures, but 1 called_workers"),
            ({"called_workers": [1, 1]}, "names a rank twice"),
        ],
    )
    def test_ranks_that_contradict_futures(self, local_ray, arguments, message):
        """A future whose ranks and references contradict each other is refused."""
        with pytest.raises(ValueError, match=message):
            MultiWorkerFuture([ray.put(0), ray.put(1)], **arguments).get_results()


def test_handles_are_ordinary(group):
    """`group.workers[i]` is a Ray handle with the class's own methods, whose generators stream."""
    assert ray.get(group.workers[2].echo.remote(1, timeout=4, method="m")) == ((1,), {"timeout": 4, "method": "m"})
    assert [ray.get(ref) for ref in group.workers[0].items.remote(3, start=5)] == [5, 6, 7]
    assert [ray.get(ref) for ref in group.workers[1].slow_items.remote(3)] == [0, 1, 2]


@pytest.mark.smoke
def test_calls_keep_their_order(group):
    """Calls of one thread reach a worker in the order in which they were made."""
    refs = [group.run_single_worker_single_data("count", 0)]
    for _ in range(20):
        group.run_single_worker_single_data("give", 0, 1)
        refs.append(group.run_single_worker_single_data("count", 0))
    counts = ray.get(refs)
    assert [n - counts[0] for n in counts] == list(range(21))


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
