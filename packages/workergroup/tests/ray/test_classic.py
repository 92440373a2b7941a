# SPDX-License-Identifier: Apache-2.0
"""Tests of the classic calling methods: recipients, arguments, refused calls, and lost workers."""

import collections
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError, WorkerGroupError

from ..classic import AXES, DP, OVER_DP, TP, Recorder, calls, results

SHARED = (Recorder, AXES)


class TestSingleData:
    def test_one_worker(self, group):
        """One worker is called; its ref is an ordinary ref."""
        ref = group.run_single_worker_single_data("echo", 5, 1, b=2)
        assert ray.get(ref) == ((1,), {"b": 2})
        assert ray.get(group.run_single_worker_single_data("rank", worker_idx=5)) == 5

    @pytest.mark.parametrize("rank", [-1, 8])
    def test_no_such_rank(self, group, rank):
        """A rank outside the group is refused with the valid range."""
        with pytest.raises(IndexError, match=f"worker_idx {rank} is out of range: the group has ranks 0 to 7"):
            group.run_single_worker_single_data("rank", rank)

    @pytest.mark.parametrize("rank", ["0", 1.0, True, None])
    def test_rank_is_a_number(self, group, rank):
        """A rank is an int."""
        with pytest.raises(TypeError, match="worker_idx must be an int"):
            group.run_single_worker_single_data("rank", rank)

    @pytest.mark.smoke
    def test_all_workers(self, group):
        """All workers are called, by rank, with the same arguments."""
        refs = group.run_all_workers_single_data("echo", 1, b=2)
        assert [type(ref) for ref in refs] == [ray.ObjectRef] * 8
        assert group.get_all_worker_results(refs) == [((1,), {"b": 2})] * 8
        assert group.get_all_worker_results(group.run_all_workers_single_data("rank")) == list(range(8))

    @pytest.mark.parametrize(
        ("axes", "ranks"),
        [(None, list(range(8))), ("tp", [0, 4]), (["tp"], [0, 4]), (["dp"], [0, 1, 2, 3]), (["dp", "tp"], [0])],
    )
    def test_rank_0_only(self, group, axes, ranks):
        """Along the named axes only coordinate 0 is called."""
        refs = group.run_all_workers_single_data("rank", run_rank_0_only_axes=axes)
        assert group.get_all_worker_results(refs) == ranks

    def test_methods_of_every_kind(self, group):
        """Plain, static, class and async methods return results alike; async methods run to their end."""
        for method, answer in [("slowly", 3), ("static", 3), ("of_class", ("Recorder", 3))]:
            assert group.get_all_worker_results(group.run_all_workers_single_data(method, 3)) == [answer] * 8

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


class TestMultipleData:
    def test_each_its_own(self, group):
        """Each worker gets its value of each list, and the common arguments."""
        refs = group.run_all_workers_multiple_data("give", list(range(8)), common_kwargs={"scale": 10})
        assert group.get_all_worker_results(refs) == [10 * i for i in range(8)]
        refs = group.run_all_workers_multiple_data("give", data=[1, 2], scale=[5, 6], run_rank_0_only_axes="tp")
        assert group.get_all_worker_results(refs) == [5, 12]

    def test_arrays_are_lists(self, group):
        """The first dim of an array has a value for each worker."""
        refs = group.run_all_workers_multiple_data("give", np.arange(8))
        assert group.get_all_worker_results(refs) == list(range(8))

    def test_series_are_lists(self, group):
        """The values of a pandas Series, which has keys but is not a mapping, are a list too."""

        class Series(collections.UserList):
            def keys(self):
                return range(len(self))

        refs = group.run_all_workers_multiple_data("give", Series(range(8)))
        assert group.get_all_worker_results(refs) == list(range(8))

    @pytest.mark.parametrize("count", [0, 7, 9])
    def test_wrong_length(self, group, count):
        """Too few or too many values are refused with the argument's name before any worker is called."""
        before = calls(group)
        message = f"argument 'data' of 'give': it has {count} values, but 8 workers are called"
        with pytest.raises(ValueError, match=message):
            group.run_all_workers_multiple_data("give", data=[0] * count)
        with pytest.raises(ValueError, match=message):
            group.run_all_workers_multiple_data("give", [0] * count)
        assert calls(group) == before

    @pytest.mark.parametrize("values", ["abcdefgh", {"a": 1}, 3])
    def test_not_a_list(self, group, values):
        """Text, mappings and single values are not lists of values."""
        with pytest.raises(TypeError, match="must be a list with a value per worker called"):
            group.run_all_workers_multiple_data("give", data=values)

    def test_common_argument_given_twice(self, group):
        """A name cannot be given both per worker and as a common argument."""
        with pytest.raises(ValueError, match=r"\['data'\] are given both per worker and in common_kwargs"):
            group.run_all_workers_multiple_data("give", data=[0] * 8, common_kwargs={"data": 1})


class TestShardedData:
    @pytest.mark.smoke
    def test_sharded_and_replicated(self, group):
        """Coordinate c along dp gets piece c, and all workers along tp get the same piece."""
        assert results(group, "give", ["a", "b"], **OVER_DP) == ["a"] * 4 + ["b"] * 4
        assert results(group, "give", data=["a", "b"], common_kwargs={"scale": 2}, **OVER_DP) == ["aa"] * 4 + ["bb"] * 4

    def test_one_answer_per_coordinate(self, group):
        """Along output_is_replicated only coordinate 0 returns a result, but the others are called too."""
        before = calls(group)
        future = group.run_all_workers_sharded_data("give", ["a", "b"], output_is_replicated=["tp"], **OVER_DP)
        assert group.get_all_worker_results(future) == ["a", "b"]
        assert (future.return_from_workers, future.called_workers) == ([0, 4], list(range(8)))
        assert ray.get(future.futures) == ["a", None, None, None, "b", None, None, None]
        assert calls(group) == [n + 1 for n in before]

    def test_free_axes(self, group):
        """Along an axis that is neither sharded nor replicated, only coordinate 0 is called."""
        before = calls(group)
        assert results(group, "give", ["a", "b"], in_sharded_axes="dp") == ["a", "b"]
        assert [now - then for now, then in zip(calls(group), before, strict=True)] == [1, 0, 0, 0, 1, 0, 0, 0]

    def test_dummy_calls(self, group):
        """Dummy calls reach the other workers along free axes with None, and their results are not returned."""
        before = calls(group)
        future = group.run_all_workers_sharded_data(
            "give", ["a", "b"], in_sharded_axes=["dp"], make_dummy_calls_to_free_axes=True
        )
        assert group.get_all_worker_results(future) == ["a", "b"]
        assert calls(group) == [n + 1 for n in before]

    def test_nested_pieces(self, group):
        """Two sharded axes index nested pieces, in the order given."""
        by_tp_dp = [[f"tp{t}dp{d}" for d in range(DP)] for t in range(TP)]
        assert results(group, "give", by_tp_dp, in_sharded_axes=["tp", "dp"]) == [
            f"tp{t}dp{d}" for d in range(DP) for t in range(TP)
        ]

    def test_refs_are_passed_through(self, group, puts):
        """An ObjectRef as a piece reaches the worker as its value, without a put or a fetch."""
        refs = [ray.put("a"), ray.put("b")]
        puts.clear()
        future = group.run_all_workers_sharded_data("give", refs, **OVER_DP)
        assert puts == []
        assert group.get_all_worker_results(future) == ["a"] * 4 + ["b"] * 4

    @pytest.mark.parametrize(
        ("pieces", "message"),
        [
            (["a"], "depth 0, axis 'dp' (pieces): expected 2, found 1"),
            (["a", "b", "c"], "depth 0, axis 'dp' (pieces): expected 2, found 3"),
            ([["a"] * 4, ["b"] * 3], "depth 1, axis 'tp' (pieces[1]): expected 4, found 3"),
            ([["a"] * 5, ["b"] * 4], "depth 1, axis 'tp' (pieces[0]): expected 4, found 5"),
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

    @pytest.mark.parametrize(
        "axes",
        [
            {"in_sharded_axes": ["pp"]},
            {"replicate_on_axes": ["pp"]},
            {"output_is_replicated": ["pp"]},
        ],
    )
    def test_unknown_axis(self, group, axes):
        """An unknown axis in any of the arguments is refused before any worker is called."""
        before = calls(group)
        with pytest.raises(ValueError, match=r"Invalid axis name: 'pp'. Valid names are: \['dp', 'tp'\]"):
            group.run_all_workers_sharded_data("give", ["a", "b"], **axes)
        assert calls(group) == before
        with pytest.raises(ValueError, match="Invalid axis name: 'pp'"):
            group.run_all_workers_single_data("rank", run_rank_0_only_axes=["pp"])
        with pytest.raises(ValueError, match="Invalid axis name: 'pp'"):
            group.run_all_workers_multiple_data("give", [0], run_rank_0_only_axes="pp")

    def test_sharded_and_replicated_axis(self, group):
        """An axis cannot be both sharded and replicated."""
        with pytest.raises(ValueError, match=r"both sharded and replicated: \['dp'\]"):
            group.run_all_workers_sharded_data("give", ["a", "b"], in_sharded_axes=["dp"], replicate_on_axes=["dp"])


class TestBeforeTheFirstLaunch:
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

    def test_decorated_methods(self, group):
        """A decorated method, as by `torch.no_grad()`, takes the arguments that the decorator's function takes."""
        assert group.call("decorated", 3, scale=2).result() == [6] * 8
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            group.call("decorated", 3, 4).result()


def test_handles_are_ordinary(group):
    """`group.workers[i]` is a Ray handle with the class's own methods, whatever their arguments are called."""
    assert ray.get(group.workers[2].echo.remote(1, timeout=4, method="m")) == ((1,), {"timeout": 4, "method": "m"})


@pytest.mark.smoke
def test_calls_keep_their_order(group):
    """Calls of one thread reach a worker in the order in which they were made."""
    refs = [group.run_single_worker_single_data("count", 0)]
    for _ in range(20):
        group.run_single_worker_single_data("give", 0, 1)
        refs.append(group.run_single_worker_single_data("count", 0))
    counts = ray.get(refs)
    assert [n - counts[0] for n in counts] == list(range(21))


def test_several_threads(group):
    """Several threads may call a group; each gets its own results, in its own order."""

    def work(thread: int) -> list[list[int]]:
        def call(number: int) -> list[int]:
            refs = group.run_all_workers_multiple_data("give", [1000 * thread + number] * 8)
            return group.get_all_worker_results(refs)

        return [call(number) for number in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for thread, answers in enumerate(pool.map(work, range(4))):
            assert answers == [[1000 * thread + number] * 8 for number in range(20)]


def test_children_of_workers(group):
    """The actors and tasks of a worker run in its placement group, as engines with their own workers need."""
    parents, children = zip(
        *group.get_all_worker_results(group.run_all_workers_single_data("child_and_own_group")), strict=True
    )
    assert len(set(parents)) == 1
    assert children == parents


def test_a_killed_worker(cluster, capsys, requests):
    """A lost worker soon raises a WorkerFailureError with its rank and node; later calls are refused at once."""
    axes = NamedSharding.from_shape(dp=1, tp=3)
    with RayWorkerGroup(cluster, RayWorkerBuilder(Recorder), [3], sharding_annotations=axes) as group:
        future = group.run_all_workers_single_data("rank")
        ray.wait(future, num_returns=3)
        group.run_single_worker_single_data("die", 1)
        with pytest.raises(WorkerFailureError, match=r"rank 1 \(dp=0, tp=1\) on node .*: killed") as caught:
            group.get_all_worker_results(group.run_all_workers_single_data("rank"))
        (failure,) = caught.value.failures
        assert (failure.rank, failure.kind, failure.coords) == (1, "killed", {"dp": 0, "tp": 1})
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
        group.shutdown()
        with pytest.raises(WorkerGroupError, match="it has been shut down"):
            group.run_all_workers_single_data("rank")


def test_results_after_shutdown(cluster):
    """A call that a shutdown has interrupted raises that its workers were lost."""
    with RayWorkerGroup(cluster, Recorder, workers_per_node=1) as group:
        futures = group.run_all_workers_single_data("sleep", 600)
        group.shutdown()
        with pytest.raises(WorkerFailureError, match=r"rank 0 .*: killed"):
            group.get_all_worker_results(futures)
