# SPDX-License-Identifier: Apache-2.0
"""Tests of the results of the classic calling methods: stored values, generators, errors and futures."""

import numpy as np
import pytest
import ray

from fairlead_workergroup import MultiWorkerFuture, RemoteError

from ..classic import AXES, DP, OVER_DP, OddError, Recorder

SHARED = (Recorder, AXES)


class TestPutRule:
    """Each distinct large value is stored once; small plain values are not stored."""

    def test_small_values_are_inlined(self, group, puts, requests):
        """Numbers, text and small containers of them travel with the call."""
        group.get_all_worker_results(
            group.run_all_workers_single_data("echo", 1, 2.5, None, "x" * 10_000, b"y", [1, 2], {"a": "b"}, (True,))
        )
        assert (puts, requests) == ([], ["echo"] * 8)

    def test_one_put_for_all_workers(self, group, puts):
        """A large value is stored once, and all workers read the one copy in place."""
        value = np.ones(4_000_000)  # 32 MB
        seen = group.get_all_worker_results(group.run_all_workers_single_data("address_of", value))
        assert len(puts) == 1
        assert {(writeable, total) for _, writeable, total in seen} == {(False, 4_000_000.0)}

    def test_one_put_per_distinct_value(self, group, puts):
        """An object that is given several times, and in several arguments, is stored once."""
        a, b = np.zeros(10_000), np.ones(10_000)
        ray.get(group.run_all_workers_multiple_data("echo", [a, b] * 4, [b] * 8, common_kwargs={"more": a}))
        assert len(puts) == 2

    def test_one_put_per_piece(self, group, puts):
        """An argument that is sharded over dp and replicated over tp makes one put for each piece."""
        pieces = [np.full(10_000, i) for i in range(DP)]
        future = group.run_all_workers_sharded_data("address_of", pieces, output_is_replicated=["tp"], **OVER_DP)
        assert [total for *_, total in group.get_all_worker_results(future)] == [0.0, 10_000.0]
        assert len(puts) == DP

    def test_silent_workers_return_nothing(self, group):
        """The result of a worker that is not wanted is not stored: its ref holds None."""
        pieces = [np.ones(1_000_000), np.ones(1_000_000)]
        future = group.run_all_workers_sharded_data("give", pieces, output_is_replicated=["tp"], **OVER_DP)
        answers = group.get_all_worker_results(future)
        assert [answer.sum() for answer in answers] == [1e6, 1e6]
        silent = set(range(8)).difference(future.return_from_workers)
        assert ray.get([future.futures[rank] for rank in silent]) == [None] * 6


class TestGenerators:
    def test_streams_from_a_handle(self, group):
        """A generator method of a handle streams as in plain Ray."""
        assert [ray.get(ref) for ref in group.workers[0].items.remote(3, start=5)] == [5, 6, 7]

    def test_items_of_all_workers(self, group):
        """The items of each worker stand at its place."""
        refs = group.run_all_workers_multiple_data("items", [2, 0] * 4, start=[10 * i for i in range(8)])
        assert group.get_all_worker_results(refs) == [0, 1, 20, 21, 40, 41, 60, 61]

    def test_async_generator(self, group):
        """An async generator streams as well."""
        assert [ray.get(ref) for ref in group.workers[1].slow_items.remote(3)] == [0, 1, 2]

    def test_proxies(self, group):
        """With proxies, generators are returned as iterators of refs."""
        future = group.run_all_workers_sharded_data("items", [1, 2], output_is_replicated=["tp"], **OVER_DP)
        proxies = group.get_all_worker_results(future, return_generators_as_proxies=True)
        assert [[ray.get(ref) for ref in proxy] for proxy in proxies] == [[0], [0, 1]]

    def test_silent_generators_run(self, group):
        """A generator whose items are not wanted is exhausted on the worker, and nothing travels."""
        future = group.run_all_workers_sharded_data("items", [1, 2], output_is_replicated=["tp"], **OVER_DP)
        assert group.get_all_worker_results(future) == [0, 0, 1]


class TestErrors:
    def test_type_is_kept(self, group):
        """A worker's exception is raised with its own type and arguments, and notes that name the failed ranks."""
        future = group.run_all_workers_single_data("fail", [6])
        with pytest.raises(OddError) as caught:
            group.get_all_worker_results(future)
        assert (type(caught.value), caught.value.number) == (OddError, 7)
        assert caught.value.__notes__[0].startswith("raised by rank 6 (dp=1, tp=2) on node ")
        assert "OddError" in str(caught.value.__cause__)

    def test_all_failing_ranks_are_named(self, group):
        """Each failed rank has a note."""
        future = group.run_all_workers_single_data("fail", [1, 3], "key")
        ray.wait(future, num_returns=8)
        with pytest.raises(KeyError, match="missing") as caught:
            group.get_all_worker_results(future)
        assert [note[: len("raised by rank 1")] for note in caught.value.__notes__] == [
            "raised by rank 1",
            "raised by rank 3",
        ]

    def test_silent_workers_errors_count(self, group):
        """A worker whose result is not wanted still reports its error."""
        future = group.run_all_workers_sharded_data(
            "fail", [[2], [2]], output_is_replicated=["tp"], in_sharded_axes=["dp"], replicate_on_axes=["tp"]
        )
        with pytest.raises(OddError, match="odd"):
            group.get_all_worker_results(future)

    def test_class_that_the_driver_cannot_import(self, group):
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
    def test_futures_of_users(self, group):
        """A future can be made from refs, with the ranks that are wanted."""
        refs = [ray.put(i) for i in range(4)]
        assert MultiWorkerFuture(refs).get_results() == [0, 1, 2, 3]
        assert MultiWorkerFuture(refs, return_from_workers=[2, 0]).get_results(group) == [2, 0]
        assert MultiWorkerFuture(refs, [7, 3], [1, 3, 5, 7]).get_results() == [3, 1]
        assert MultiWorkerFuture(refs, [9, 3, 0], [1, 3, 5, 7]).get_results() == [1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"called_workers": [1]}, "2 futures, but 1 called_workers"),
            ({"called_workers": [1, 1]}, "names a rank twice"),
        ],
    )
    def test_contradictions(self, local_ray, arguments, message):
        """Ranks and futures that contradict each other are refused."""
        with pytest.raises(ValueError, match=message):
            MultiWorkerFuture([ray.put(0), ray.put(1)], **arguments).get_results()
