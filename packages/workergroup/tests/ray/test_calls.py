# SPDX-License-Identifier: Apache-2.0
"""The classic calling methods, on real workers."""

import functools
import os
import re
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    MultiWorkerFuture,
    RayWorkerBuilder,
    RayWorkerGroup,
    RemoteError,
    WorkerFailureError,
    WorkerGroupError,
)

DP, TP = 2, 4


class OddError(ValueError):
    """Takes two arguments, as exceptions that pickle badly do."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)
        self.number = number


def decorator(method):
    """As most are: `self` is among the positional arguments."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


class Recorder:
    """Answers what it was called with, and counts."""

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
        """Which copy of the value this worker reads."""
        return value.ctypes.data, value.flags.writeable, float(value.sum())

    def reserved_names(self, method, worker_idx, run_rank_0_only_axes=None, common_kwargs=None, self_=None):
        return method, worker_idx, run_rank_0_only_axes, common_kwargs

    def fail(self, ranks, kind="value"):
        self.calls += 1
        if int(os.environ["RANK"]) in ranks:
            raise {"value": OddError("odd", 7), "key": KeyError("missing")}[kind]
        return "fine"

    def fail_unimportable(self):
        module = sys.modules["nowhere_else"] = types.ModuleType("nowhere_else")
        exec("class Unimportable(Exception): pass", module.__dict__)
        raise module.Unimportable("only here")

    def items(self, n, start=0):
        for i in range(n):
            yield start + i

    async def slowly(self, value):
        import asyncio

        await asyncio.sleep(0.01)
        return value

    async def slow_items(self, n):
        import asyncio

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


AXES = NamedSharding.from_shape(dp=DP, tp=TP)
OVER_DP = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}


@pytest.fixture(scope="module")
def shared(local_ray: None) -> Iterator[RayWorkerGroup]:
    """One group for the tests that leave it as it was."""
    with (
        RayVirtualCluster([DP * TP], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Recorder, sharding_annotations=AXES) as group,
    ):
        yield group


@pytest.fixture
def group(shared: RayWorkerGroup) -> RayWorkerGroup:
    """The shared group."""
    return shared


def calls(group: RayWorkerGroup) -> list[int]:
    return group.get_all_worker_results(group.run_all_workers_single_data("count"))


def results(group: RayWorkerGroup, *args, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_sharded_data(*args, **kwargs))


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
        """Anything but an int is no rank."""
        with pytest.raises(TypeError, match="worker_idx must be an int"):
            group.run_single_worker_single_data("rank", rank)

    def test_all_workers(self, group):
        """All are called, by rank, with the same arguments."""
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
        """Plain, static, class and async methods answer alike; async ones run to their end."""
        for method, answer in [("slowly", 3), ("static", 3), ("of_class", ("Recorder", 3))]:
            assert group.get_all_worker_results(group.run_all_workers_single_data(method, 3)) == [answer] * 8

    def test_worker_parameters_named_like_ours(self, group):
        """A method may have parameters of the same names; they are given by position, or as common arguments."""
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
        """Every worker gets its value of each list, and the common arguments."""
        refs = group.run_all_workers_multiple_data("give", list(range(8)), common_kwargs={"scale": 10})
        assert group.get_all_worker_results(refs) == [10 * i for i in range(8)]
        refs = group.run_all_workers_multiple_data("give", data=[1, 2], scale=[5, 6], run_rank_0_only_axes="tp")
        assert group.get_all_worker_results(refs) == [5, 12]

    def test_arrays_are_lists(self, group):
        """The first dim of an array has a value per worker."""
        refs = group.run_all_workers_multiple_data("give", np.arange(8))
        assert group.get_all_worker_results(refs) == list(range(8))

    @pytest.mark.parametrize("count", [0, 7, 9])
    def test_wrong_length(self, group, count):
        """Too few or too many values are refused, naming the argument, before anybody is called."""
        before = calls(group)
        with pytest.raises(ValueError, match=f"argument 'data' has {count} values, but 8 workers are called"):
            group.run_all_workers_multiple_data("give", data=[0] * count)
        with pytest.raises(ValueError, match=f"positional argument 0 has {count} values"):
            group.run_all_workers_multiple_data("give", [0] * count)
        assert calls(group) == before

    @pytest.mark.parametrize("values", ["abcdefgh", {"a": 1}, 3])
    def test_not_a_list(self, group, values):
        """Text, mappings and single values are no lists of values."""
        with pytest.raises(TypeError, match="must be a list with a value per worker called"):
            group.run_all_workers_multiple_data("give", data=values)

    def test_common_argument_given_twice(self, group):
        """A name cannot be both per worker and common."""
        with pytest.raises(ValueError, match=r"\['data'\] are given both per worker and in common_kwargs"):
            group.run_all_workers_multiple_data("give", data=[0] * 8, common_kwargs={"data": 1})


class TestShardedData:
    def test_sharded_and_replicated(self, group):
        """Coordinate c along dp gets piece c, all along tp the same."""
        assert results(group, "give", ["a", "b"], **OVER_DP) == ["a"] * 4 + ["b"] * 4
        assert results(group, "give", data=["a", "b"], common_kwargs={"scale": 2}, **OVER_DP) == ["aa"] * 4 + ["bb"] * 4

    def test_one_answer_per_coordinate(self, group):
        """Along output_is_replicated only coordinate 0 answers; the others are called all the same."""
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
        """Dummy calls reach the others along free axes, with None, and their answers are not returned."""
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

    def test_refs_are_passed_through(self, group):
        """An ObjectRef as a piece reaches the worker as its value, without a put or a fetch."""
        refs = [ray.put("a"), ray.put("b")]
        before = group.statistics()
        future = group.run_all_workers_sharded_data("give", refs, **OVER_DP)
        assert group.statistics().puts == before.puts
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
        """Too few or too many pieces, at any depth, are refused before anybody is called."""
        before = calls(group)
        axes = ["dp", "tp"] if isinstance(pieces[0], list) else ["dp"]
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            group.run_all_workers_sharded_data("give", data=pieces, in_sharded_axes=axes)
        assert caught.value.__notes__ == ["in argument 'data' of 'give'"]
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
        """An unknown axis in any of the arguments is refused before anybody is called."""
        before = calls(group)
        with pytest.raises(ValueError, match=r"Invalid axis name: 'pp'. Valid names are: \['dp', 'tp'\]"):
            group.run_all_workers_sharded_data("give", ["a", "b"], **axes)
        assert calls(group) == before
        with pytest.raises(ValueError, match="Invalid axis name: 'pp'"):
            group.run_all_workers_single_data("rank", run_rank_0_only_axes=["pp"])
        with pytest.raises(ValueError, match="Invalid axis name: 'pp'"):
            group.run_all_workers_multiple_data("give", [0], run_rank_0_only_axes="pp")

    def test_sharded_and_replicated_axis(self, group):
        """An axis cannot be both."""
        with pytest.raises(ValueError, match=r"both sharded and replicated: \['dp'\]"):
            group.run_all_workers_sharded_data("give", ["a", "b"], in_sharded_axes=["dp"], replicate_on_axes=["dp"])


class TestBeforeTheFirstLaunch:
    @pytest.mark.parametrize("name", ["nothing", "_private", "__init__", "calls"])
    def test_unknown_method(self, group, name):
        """What is no public method is refused with a list of those there are."""
        before = group.statistics().requests
        for call in (
            lambda: group.run_single_worker_single_data(name, 0),
            lambda: group.run_all_workers_single_data(name),
            lambda: group.run_all_workers_multiple_data(name),
            lambda: group.run_all_workers_sharded_data(name),
        ):
            with pytest.raises(AttributeError, match=rf"Recorder has no public method '{name}'; it has \['address_of'"):
                call()
        assert group.statistics().requests == before

    def test_arguments_the_method_does_not_take(self, group):
        """Missing, unknown and surplus arguments are refused as calling the method would, and nobody runs."""
        before = calls(group)
        with pytest.raises(TypeError, match=r"give.*missing a required argument: 'data'"):
            group.run_all_workers_single_data("give")
        with pytest.raises(TypeError, match="unexpected keyword argument 'sale'"):
            group.run_all_workers_single_data("give", 1, sale=2)
        with pytest.raises(TypeError, match="too many positional arguments"):
            group.run_single_worker_single_data("rank", 0, 1)
        assert calls(group) == before

    def test_decorated_methods(self, group):
        """What a decorator makes of a method, such as `torch.no_grad()`, takes what the decorator's function takes."""
        assert group.call("decorated", 3, scale=2).result() == [6] * 8
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            group.call("decorated", 3, 4).result()


class TestPutRule:
    """Everything distinct is stored once; small plain values are not stored at all."""

    def test_small_values_are_inlined(self, group):
        """Numbers, text and small containers of them travel with the call."""
        before = group.statistics()
        group.get_all_worker_results(
            group.run_all_workers_single_data("echo", 1, 2.5, None, "x" * 10_000, b"y", [1, 2], {"a": "b"}, (True,))
        )
        after = group.statistics()
        assert (after.puts - before.puts, after.bytes_put - before.bytes_put) == (0, 0)
        assert after.requests - before.requests == 8

    def test_one_put_for_all_workers(self, group):
        """A large value is stored once, and all workers read the one copy in place."""
        value = np.ones(4_000_000)  # 32 MB
        before = group.statistics()
        seen = group.get_all_worker_results(group.run_all_workers_single_data("address_of", value))
        after = group.statistics()
        assert after.puts - before.puts == 1
        assert 32_000_000 <= after.bytes_put - before.bytes_put < 32_100_000
        assert {(writeable, total) for _, writeable, total in seen} == {(False, 4_000_000.0)}
        assert after.bytes_fetched - before.bytes_fetched < 10_000

    def test_one_put_per_distinct_value(self, group):
        """By identity: the same object given several times, and in several arguments, is stored once."""
        a, b = np.zeros(10_000), np.ones(10_000)
        before = group.statistics().puts
        ray.get(group.run_all_workers_multiple_data("echo", [a, b] * 4, [b] * 8, common_kwargs={"more": a}))
        assert group.statistics().puts - before == 2

    def test_one_put_per_piece(self, group):
        """Sharded over dp and replicated over tp: as many puts as pieces."""
        pieces = [np.full(10_000, i) for i in range(DP)]
        before = group.statistics()
        future = group.run_all_workers_sharded_data("address_of", pieces, output_is_replicated=["tp"], **OVER_DP)
        assert [total for *_, total in group.get_all_worker_results(future)] == [0.0, 10_000.0]
        after = group.statistics()
        assert (after.puts - before.puts, after.fetched - before.fetched) == (DP, DP)

    def test_silent_workers_return_nothing(self, group):
        """The answer of a worker that is not asked for it is not stored: its ref holds None."""
        before = group.statistics()
        pieces = [np.ones(1_000_000), np.ones(1_000_000)]
        future = group.run_all_workers_sharded_data("give", pieces, output_is_replicated=["tp"], **OVER_DP)
        answers = group.get_all_worker_results(future)
        fetched = group.statistics().bytes_fetched - before.bytes_fetched
        assert [answer.sum() for answer in answers] == [1e6, 1e6]
        assert 16_000_000 <= fetched < 16_100_000


class TestGenerators:
    def test_streams_from_a_handle(self, group):
        """A generator method of a handle streams by Ray's own rule."""
        assert [ray.get(ref) for ref in group.workers[0].items.remote(3, start=5)] == [5, 6, 7]

    def test_items_of_all_workers(self, group):
        """The items of each worker come at its place."""
        refs = group.run_all_workers_multiple_data("items", [2, 0] * 4, start=[10 * i for i in range(8)])
        assert group.get_all_worker_results(refs) == [0, 1, 20, 21, 40, 41, 60, 61]

    def test_async_generator(self, group):
        """An async generator streams as well."""
        assert [ray.get(ref) for ref in group.workers[1].slow_items.remote(3)] == [0, 1, 2]

    def test_proxies(self, group):
        """With proxies, generators stay what they are: iterators of refs."""
        future = group.run_all_workers_sharded_data("items", [1, 2], output_is_replicated=["tp"], **OVER_DP)
        proxies = group.get_all_worker_results(future, return_generators_as_proxies=True)
        assert [[ray.get(ref) for ref in proxy] for proxy in proxies] == [[0], [0, 1]]

    def test_silent_generators_run(self, group):
        """A generator nobody listens to is exhausted on the worker, and nothing travels."""
        before = group.statistics().fetched
        future = group.run_all_workers_sharded_data("items", [1, 2], output_is_replicated=["tp"], **OVER_DP)
        assert group.get_all_worker_results(future) == [0, 0, 1]
        assert group.statistics().fetched - before == 3


class TestErrors:
    def test_type_is_kept(self, group):
        """A worker's exception is raised with its own type and arguments, and notes that say who failed."""
        future = group.run_all_workers_single_data("fail", [6])
        with pytest.raises(OddError) as caught:
            group.get_all_worker_results(future)
        assert (type(caught.value), caught.value.number) == (OddError, 7)
        assert caught.value.__notes__[0].startswith("raised by rank 6 (dp=1, tp=2) on node ")
        assert "OddError" in str(caught.value.__cause__)

    def test_all_failing_ranks_are_named(self, group):
        """Every rank that has failed has a note."""
        future = group.run_all_workers_single_data("fail", [1, 3], "key")
        ray.wait(future, num_returns=8)
        with pytest.raises(KeyError, match="missing") as caught:
            group.get_all_worker_results(future)
        assert [note[: len("raised by rank 1")] for note in caught.value.__notes__] == [
            "raised by rank 1",
            "raised by rank 3",
        ]

    def test_silent_workers_errors_count(self, group):
        """A worker that is not asked for an answer still reports its error."""
        future = group.run_all_workers_sharded_data(
            "fail", [[2], [2]], output_is_replicated=["tp"], in_sharded_axes=["dp"], replicate_on_axes=["tp"]
        )
        with pytest.raises(OddError, match="odd"):
            group.get_all_worker_results(future)

    def test_class_that_is_not_known_here(self, group):
        """An exception whose class cannot be imported here arrives as RemoteError, with its name and traceback."""
        with pytest.raises(RemoteError, match="only here") as caught:
            group.get_all_worker_results([group.run_single_worker_single_data("fail_unimportable", 5)])
        assert caught.value.rank == 5
        assert caught.value.type_name == "nowhere_else.Unimportable"
        assert "fail_unimportable" in caught.value.remote_traceback
        call = group.call("fail_unimportable")
        assert call.wait(60)
        with pytest.raises(RemoteError) as caught:
            call.result()
        assert [note.rpartition(": ")[2] for note in caught.value.__notes__[1:]] == ["Unimportable"] * 7

    def test_errors_in_generators(self, group):
        """An error while a generator runs is raised like any other."""
        with pytest.raises(TypeError, match="str"):
            group.get_all_worker_results(group.run_all_workers_single_data("items", 2, start="x"))


class TestFutures:
    def test_made_by_users(self, group):
        """A future can be made from refs, and says which of them are wanted."""
        refs = [ray.put(i) for i in range(4)]
        assert MultiWorkerFuture(refs).get_results() == [0, 1, 2, 3]
        assert MultiWorkerFuture(refs, return_from_workers=[2, 0]).get_results(group) == [2, 0]
        assert MultiWorkerFuture(refs, [7, 3], [1, 3, 5, 7]).get_results() == [3, 1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"return_from_workers": [9]}, r"ranks \[9\], which were not called: \[0, 1\]"),
            ({"called_workers": [1]}, "2 futures, but 1 called_workers"),
            ({"called_workers": [1, 1]}, "names a rank twice"),
        ],
    )
    def test_contradictions(self, local_ray, arguments, message):
        """What does not fit together is refused."""
        with pytest.raises(ValueError, match=message):
            MultiWorkerFuture([ray.put(0), ray.put(1)], **arguments).get_results()


def test_handles_are_ordinary(group):
    """`group.workers[i]` is a Ray handle with the class's own methods, whatever their arguments are called."""
    assert ray.get(group.workers[2].echo.remote(1, timeout=4, method="m")) == ((1,), {"timeout": 4, "method": "m"})


def test_calls_keep_their_order(group):
    """Calls of one thread reach a worker in the order they were made."""
    refs = [group.run_single_worker_single_data("count", 0)]
    for _ in range(20):
        group.run_single_worker_single_data("give", 0, 1)
        refs.append(group.run_single_worker_single_data("count", 0))
    counts = ray.get(refs)
    assert [n - counts[0] for n in counts] == list(range(21))


def test_several_threads(group):
    """Groups may be called from several threads; each gets its own answers, in its own order."""

    def work(thread: int) -> list[list[int]]:
        def call(number: int) -> list[int]:
            refs = group.run_all_workers_multiple_data("give", [1000 * thread + number] * 8)
            return group.get_all_worker_results(refs)

        return [call(number) for number in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for thread, answers in enumerate(pool.map(work, range(4))):
            assert answers == [[1000 * thread + number] * 8 for number in range(20)]


def test_children_of_workers(group):
    """What a worker starts runs in its placement group, as engines with workers of their own need."""
    parents, children = zip(
        *group.get_all_worker_results(group.run_all_workers_single_data("child_and_own_group")), strict=True
    )
    assert len(set(parents)) == 1
    assert children == parents


def test_a_killed_worker(cluster, capsys):
    """A lost worker is a WorkerFailureError that says who and where, soon after; later calls are refused at once."""
    with RayWorkerGroup(cluster, RayWorkerBuilder(Recorder), sharding_annotations=AXES) as group:
        future = group.run_all_workers_single_data("rank")
        ray.wait(future, num_returns=8)
        group.run_single_worker_single_data("die", 3)
        began = time.monotonic()
        with pytest.raises(WorkerFailureError, match=r"rank 3 \(dp=0, tp=3\) on node .*: killed") as caught:
            group.get_all_worker_results(group.run_all_workers_single_data("rank"))
        assert time.monotonic() - began < 10
        (failure,) = caught.value.failures
        assert (failure.rank, failure.kind, failure.coords) == (3, "killed", {"dp": 0, "tp": 3})
        assert group.get_all_worker_results(future) == list(range(8))
        requests = group.statistics().requests
        with pytest.raises(WorkerFailureError, match="rank 3"):
            group.run_all_workers_single_data("rank")
        assert group.statistics().requests == requests
        assert ray.get(group.run_single_worker_single_data("rank", 2)) == 2
        assert [worker["state"] for worker in group.worker_metadata] == ["alive"] * 3 + ["dead"] + ["alive"] * 4
        cluster.print_cluster_grid(group)
        shown = capsys.readouterr().out.rpartition("Ray Cluster:")[2]
        assert ("W 3" in shown, shown.count("dead"), shown.count("alive")) == (True, 1, 0)
        group.shutdown()
        with pytest.raises(WorkerGroupError, match="it has been shut down"):
            group.run_all_workers_single_data("rank")


def test_results_after_shutdown(cluster):
    """A call that a shutdown has cut short says that its workers were lost."""
    with RayWorkerGroup(cluster, Recorder, workers_per_node=2) as group:
        futures = group.run_all_workers_single_data("sleep", 600)
        group.shutdown()
        with pytest.raises(WorkerFailureError, match=r"rank 0 .*: killed"):
            group.get_all_worker_results(futures)
