# SPDX-License-Identifier: Apache-2.0
"""`call`: who gets what, who answers, what is stored and fetched, and what becomes of a call."""

import asyncio
import gc
import os
import pickle
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    Call,
    CallCancelledError,
    CallTimeoutError,
    LateWorker,
    MultiWorkerFuture,
    PerWorker,
    RayWorkerGroup,
    Shard,
    WorkerFailureError,
)

# Rank 5 is at dp=0, tp=0, and so on: nothing may depend on ranks counting up.
LAYOUT = [[5, 1, 6, 2], [0, 7, 3, 4]]
MB = 1_000_000


class Worker:
    """Answers, waits, fails and counts as it is told."""

    def __init__(self):
        self.ran = []

    def rank(self):
        return int(os.environ["RANK"])

    def echo(self, *args, **kwargs):
        return args, kwargs

    def total(self, value):
        return float(sum(part.sum() for part in value) if isinstance(value, list) else value.sum())

    def make(self, megabytes):
        return np.full(megabytes * MB // 8, float(os.environ["RANK"]))

    def fail(self, ranks):
        if self.rank() in ranks:
            raise ValueError(f"rank {self.rank()} would not")
        return "fine"

    def sleep(self, seconds, ranks=range(8), tag=None):
        self.ran.append(tag)
        if self.rank() in ranks:
            time.sleep(seconds)
        return tag

    def hold(self, value):
        self.held = value

    def what_ran(self):
        return self.ran

    def items(self, count, pause_s=0.0):
        for i in range(count):
            time.sleep(pause_s)
            yield self.rank() * 100 + i

    def items_then_fail(self, count):
        yield from range(count)
        raise KeyError("no more")

    def items_then_die(self, ranks):
        yield 1
        if self.rank() in ranks:
            os._exit(1)

    async def slow_echo(self, value, seconds=0.01):
        await asyncio.sleep(seconds)
        return value

    def with_our_names(self, collect, timeout, discard=None, first_along=None):
        return collect, timeout, discard, first_along

    def gathered_items(self, values):
        yield from values

    def die(self, ranks):
        if self.rank() in ranks:
            os._exit(1)


AXES = NamedSharding(LAYOUT, ["dp", "tp"])


@pytest.fixture(scope="module")
def shared(local_ray: None) -> Iterator[RayWorkerGroup]:
    """One group for the tests that leave it as it was."""
    with (
        RayVirtualCluster([8], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, sharding_annotations=AXES) as group,
    ):
        yield group


@pytest.fixture
def group(shared: RayWorkerGroup) -> RayWorkerGroup:
    """The shared group."""
    return shared


@pytest.fixture
def doomed(local_ray: None) -> Iterator[RayWorkerGroup]:
    """A group of four workers for the tests that lose some of them."""
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, sharding_annotations=NamedSharding.from_shape(dp=2, tp=2)) as group,
    ):
        yield group


class TestWhoGetsWhatAndWhoAnswers:
    def test_everybody(self, group):
        """Without options all are called with the same, and answer by rank."""
        call = group.call("rank")
        assert isinstance(call, Call)
        assert isinstance(call, MultiWorkerFuture)
        assert call.result() == list(range(8))
        assert group.call("echo", 1, b=2).result() == [((1,), {"b": 2})] * 8

    def test_shards(self, group):
        """Each argument has its own axes; the worker at coordinate c gets piece c whatever its rank."""
        got = group.call("echo", Shard(["d0", "d1"], "dp"), x=Shard([["t0d0", "t0d1"]] + [["?", "?"]] * 3, "tp", "dp"))
        answers = got.result()
        assert answers[5] == (("d0",), {"x": "t0d0"})
        assert answers[0] == (("d1",), {"x": "t0d1"})
        assert [args[0] for args, _ in answers] == ["d1", "d0", "d0", "d1", "d1", "d0", "d0", "d1"]

    def test_per_worker(self, group):
        """One value for each called worker, by ascending rank."""
        assert [args[0] for args, _ in group.call("echo", PerWorker([f"r{i}" for i in range(8)])).result()] == [
            f"r{i}" for i in range(8)
        ]
        assert group.call("echo", PerWorker(["r0", "r5"]), first_along="tp").result() == [(("r0",), {}), (("r5",), {})]

    @pytest.mark.parametrize(
        ("collect", "ranks"),
        [
            ("dp", [5, 0]),
            (["tp"], [5, 1, 6, 2]),
            (("dp", "tp"), [5, 1, 6, 2, 0, 7, 3, 4]),
            (("tp", "dp"), [5, 0, 1, 7, 6, 3, 2, 4]),
            ((), 5),
        ],
    )
    def test_collect(self, group, collect, ranks):
        """One answer per coordinate, row-major in the order given; with no axes, the one answer itself."""
        assert group.call("rank", collect=collect).result() == ranks

    def test_first_along(self, group):
        """Only coordinate 0 along the axes is called."""
        call = group.call("rank", first_along=("tp",))
        assert (call.result(), call.called_workers) == ([0, 5], [0, 5])

    def test_discard(self, group):
        """Nobody answers, and nothing is fetched; errors are raised all the same."""
        call = group.call("make", 8, discard=True)
        assert (call.result(), call.outcomes(), call.refs) == (None, [], [])
        assert call.statistics().bytes_fetched == 0
        assert ray.get(call.futures) == [None] * 8
        with pytest.raises(ValueError, match="rank 3 would not"):
            group.call("fail", [3], discard=True).result()

    def test_refused_before_anybody_is_called(self, group):
        """Wrong methods, arguments, axes, numbers of pieces and timeouts reach no worker."""
        before = group.statistics().requests
        for error, method, args, options in [
            (AttributeError, "nothing", (), {}),
            (AttributeError, "_fairlead_start", (), {}),
            (TypeError, "rank", (1,), {}),
            (ValueError, "echo", (Shard([1], "dp"),), {}),
            (ValueError, "echo", (PerWorker([1]),), {}),
            (ValueError, "rank", (), {"collect": "pp"}),
            (ValueError, "rank", (), {"timeout": -1}),
            (ValueError, "rank", (), {"timeout": float("inf")}),
            (TypeError, "rank", (), {"timeout": "1"}),
        ]:
            with pytest.raises(error):
                group.call(method, *args, **options)
            with pytest.raises(error):
                group.explain(method, *args, **options) if "timeout" not in options else group.call(method, **options)
        assert group.statistics().requests == before


class TestViews:
    def test_integers_slices_and_views_of_views(self, group):
        """An integer drops the axis, a slice keeps it and counts anew; coordinates in errors stay the group's."""
        first = group.at(dp=0)
        assert (first.ranks, first.call("rank", collect="tp").result()) == ([1, 2, 5, 6], [5, 1, 6, 2])
        some = group.at(tp=slice(1, 3))
        assert some.call("rank", collect=("dp", "tp")).result() == [1, 6, 7, 3]
        assert some.call("echo", Shard(["a", "b"], "tp")).result()[-1] == (("a",), {})
        assert some.coords == {
            1: {"dp": 0, "tp": 0},
            3: {"dp": 1, "tp": 1},
            6: {"dp": 0, "tp": 1},
            7: {"dp": 1, "tp": 0},
        }
        one = some.at(dp=-1).at(tp=0)
        assert (one.ranks, one.call("rank").result(), one.call("rank", collect=()).result()) == ([7], [7], 7)
        assert (one.sharding_annotations, one.coords) == (None, {7: {}})
        with pytest.raises(ValueError, match="rank 7 would not") as caught:
            one.call("fail", [7]).result()
        assert "rank 7 (dp=1, tp=1)" in caught.value.__notes__[0]

    def test_errors_name_axis_and_size(self, group):
        """What is not there is said with what there is."""
        with pytest.raises(IndexError, match="Coordinate 2 is outside axis 'dp' of size 2"):
            group.at(dp=2)
        with pytest.raises(ValueError, match=r"Invalid axis name: 'dp'. Valid names are: \['tp'\]"):
            group.at(dp=0).at(dp=0)

    def test_looks(self, group):
        """A view says whose and which it is, and has its workers' handles."""
        view = group.at(dp=1)
        assert repr(view) == "GroupView('', {'tp': 4}, ranks [0, 3, 4, 7])"
        assert ray.get([worker.rank.remote() for worker in view.workers]) == [0, 3, 4, 7]

    def test_with_options(self, group):
        """Options set on a view leave every keyword to the method; they add up, and views of it keep them."""
        view = group.with_options(collect="dp").with_options(timeout=30).at(tp=slice(0, 2))
        answers = view.call("with_our_names", collect=1, timeout=2, discard=3, first_along=4).result()
        assert answers == [(1, 2, 3, 4)] * 2
        assert view.explain("with_our_names", collect=1, timeout=2).summary.endswith("2 answer(s)")
        with pytest.raises(ValueError, match="Invalid axis name: 'pp'"):
            group.with_options(collect="pp")


class TestCopies:
    """Everything distinct is stored once, nothing is fetched that is not asked for; all of it is counted."""

    def test_one_put_per_distinct_value(self, group):
        """By identity, over all arguments; each worker reads the one copy."""
        a, b = np.zeros(MB), np.ones(MB)
        call = group.call("echo", a, Shard([a, b], "dp"), PerWorker([b] * 8), same=a, discard=True)
        call.result()
        assert (call.statistics().puts, call.statistics().requests) == (2, 8)
        assert 16 * MB <= call.statistics().bytes_put < 16.1 * MB

    def test_only_collected_answers_are_fetched(self, group):
        """Two of eight answer with 8 MB each: so much is fetched, once, and the others return nothing."""
        call = group.call("make", 8, collect="dp")
        assert [value[0] for value in call.result()] == [5.0, 0.0]
        call.result()
        assert call.statistics().fetched == 2
        assert 16 * MB <= call.statistics().bytes_fetched < 16.1 * MB
        silent = [at for at, rank in enumerate(call.called_workers) if rank not in (0, 5)]
        assert ray.get([call.futures[at] for at in silent]) == [None] * 6

    def test_the_store_holds_one_copy(self, group):
        """By the object store's own count, 64 MB sent to eight workers are 64 MB more, and then again none."""

        def used(at_most):
            # The store frees a moment after the last reference is gone.
            gc.collect()
            deadline = time.monotonic() + 30
            while (now := _store_used()) > at_most and time.monotonic() < deadline:
                time.sleep(0.1)
            return now

        assert used(at_most=MB) <= MB
        ref = ray.put(np.ones(8 * MB))
        assert 64 * MB <= used(at_most=65 * MB) < 65 * MB
        by_ref = group.call("hold", ref)
        by_ref.result()
        assert (by_ref.statistics().puts, used(at_most=65 * MB) < 65 * MB) == (0, True)
        by_value = group.call("hold", ray.get(ref))
        by_value.result()
        assert (by_value.statistics().puts, used(at_most=129 * MB) < 129 * MB) == (1, True)
        group.call("hold", None).result()
        del ref, by_ref, by_value
        assert used(at_most=MB) < MB

    def test_a_call_as_argument(self, group):
        """Its one answer goes on by reference: nothing is put and nothing but the last result fetched."""
        made = group.call("make", 16, collect=())
        call = group.at(dp=1).call("total", made)
        assert call.result() == [5.0 * 2 * MB] * 4
        assert (made.statistics().bytes_fetched, call.statistics().puts) == (0, 0)
        assert call.statistics().bytes_fetched < 10_000

    def test_answers_of_a_call_as_pieces(self, group):
        """A call's answers go on as shards, one to each worker, or all of them as one list."""
        made = group.call("make", 1, collect="dp")
        each = MB // 8
        assert group.call("total", Shard(made, "dp"), collect="dp").result() == [5.0 * each, 0.0]
        assert group.call("total", made).result() == [5.0 * each] * 8
        assert group.call("total", value=made, collect=()).result() == 5.0 * each
        made = group.call("make", 1)
        assert group.call("total", PerWorker(made)).result() == [each * float(rank) for rank in range(8)]
        assert group.call("total", made, discard=True).result() is None
        assert group.at(dp=0, tp=0).call("gathered_items", made).result()[0][3].tolist()[:1] == [3.0]
        assert made.statistics().bytes_fetched == 0

    def test_calls_that_cannot_be_passed_on(self, group):
        """No answer, one answer where several are wanted, or items: refused in words."""
        with pytest.raises(ValueError, match="no answer to pass on"):
            group.call("echo", group.call("rank", discard=True))
        with pytest.raises(ValueError, match="has one answer"):
            group.call("echo", Shard(group.call("rank", collect=()), "dp"))
        with pytest.raises(ValueError, match="4 answers, but 2 pieces"):
            group.call("echo", Shard(group.call("rank", collect="tp"), "dp"))
        with pytest.raises(TypeError, match="is a generator method"):
            group.call("echo", group.call("items", 2))

    def test_an_error_in_what_is_passed_on(self, group):
        """A call that gets another's failure raises that, with its type."""
        with pytest.raises(ValueError, match="would not"):
            group.call("echo", group.call("fail", [5], collect=())).result()


def _store_used() -> int:
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    told = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return told.store_stats.object_store_bytes_used


class TestWaiting:
    def test_a_timeout_consumes_nothing(self, group):
        """After a timeout the same call can be asked again, and has its result."""
        call = group.call("sleep", 1.0, tag="t")
        with pytest.raises(CallTimeoutError):
            call.result(timeout=0.2)
        assert not call.done()
        assert call.result() == ["t"] * 8
        assert call.done()

    def test_who_is_late_and_what_it_does(self, group):
        """The deadline of a call names the ranks that are not done, and the method each of them is in."""
        slow = group.at(dp=0, tp=1).call("sleep", 3.0, tag="a")
        call = group.call("rank", timeout=0.5)
        with pytest.raises(CallTimeoutError, match="1 of 8 workers have not finished 'rank'") as caught:
            call.result()
        (late,) = caught.value.late
        assert (late.rank, late.coords, late.method) == (1, {"dp": 0, "tp": 1}, "sleep")
        assert 0.2 < late.running_s < 60
        assert re.search(r"rank 1 \(dp=0, tp=1\) on node \w{8}, pid \d+: in 'sleep' for \d", str(caught.value))
        assert isinstance(caught.value, TimeoutError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.late) == (str(caught.value), caught.value.late)
        outcomes = call.outcomes()
        assert [outcome.value for outcome in outcomes if outcome.error is None] == [0, 2, 3, 4, 5, 6, 7]
        assert isinstance(outcomes[1].error, CallTimeoutError)
        slow.result()
        while not call.done():  # its deadline is over: it is not waited for any more
            time.sleep(0.05)
        assert call.result() == list(range(8))  # nothing was lost

    def test_outcomes(self, group):
        """Every worker's own, those that failed too; nothing is raised."""
        outcomes = group.call("fail", [1, 6]).outcomes()
        assert [outcome.rank for outcome in outcomes] == list(range(8))
        assert [outcome.value for outcome in outcomes] == ["fine" if r not in (1, 6) else None for r in range(8)]
        assert [type(outcome.error) for outcome in outcomes if outcome.error] == [ValueError, ValueError]
        assert outcomes[6].coords == {"dp": 0, "tp": 2}
        silent = group.call("fail", [6], collect="dp").outcomes()
        assert [(outcome.rank, outcome.value) for outcome in silent] == [(5, "fine"), (0, "fine"), (6, None)]

    def test_as_completed(self, group):
        """Iterating gives the quick ones first."""
        ranks = [outcome.rank for outcome in group.call("sleep", 0.7, ranks=[0, 5])]
        assert sorted(ranks[:6]) == [1, 2, 3, 4, 6, 7]
        assert sorted(ranks[6:]) == [0, 5]
        with pytest.raises(CallTimeoutError):
            list(group.call("sleep", 1.0, ranks=[3], timeout=0.2))

    def test_await_and_async_for(self, group):
        """In a coroutine: the result, the outcomes as they complete, errors and deadlines; the loop runs on."""

        async def main():
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            assert await group.call("sleep", 0.3, tag="x") == ["x"] * 8
            assert ticks > 5
            assert await group.call("rank", collect=()) == 5
            assert await group.call("items", 2, collect="dp") == [[500, 501], [0, 1]]
            first, *_, last = [outcome.rank async for outcome in group.call("sleep", 0.7, ranks=[4])]
            assert (first != 4, last) == (True, 4)
            with pytest.raises(ValueError, match="rank 2 would not") as caught:
                await group.call("fail", [2])
            assert "rank 2 (dp=0, tp=3)" in caught.value.__notes__[0]
            assert [type(o.error) async for o in group.call("fail", [2], collect=()) if o.rank == 2] == [ValueError]
            late = group.call("sleep", 1.0, timeout=0.2, tag="y")
            with pytest.raises(CallTimeoutError):
                await late
            results = await asyncio.gather(*(group.call("rank", collect=()) for _ in range(20)))
            assert results == [5] * 20
            ticking.cancel()

        asyncio.run(main())

    def test_slow_calls_are_logged(self, group, caplog, monkeypatch):
        """A call without a deadline says now and then whom it waits for."""
        monkeypatch.setattr("fairlead_workergroup._underway.REPORT_EVERY_S", 0.3)
        assert group.call("sleep", 1.0, ranks=[2], tag=1).result() == [1] * 8
        assert "1 of 8 workers have not finished 'sleep'" in caplog.text
        assert "rank 2 (dp=0, tp=3)" in caplog.text

    def test_statistics(self, group):
        """Requests, puts and bytes of one call, and how long sending it took."""
        call = group.call("total", np.ones(MB))
        call.result()
        told = call.statistics()
        assert (told.requests, told.puts, told.fetched) == (8, 1, 8)
        assert 0 < told.submit_s < 60
        assert repr(call) == "Call('total', 8 of 8 workers done, 8 answer)"

    def test_group_timeout(self, local_ray):
        """call_timeout_s is the deadline of calls that set none."""
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Worker, call_timeout_s=0.3) as group,
        ):
            call = group.call("sleep", 1.5, tag=2)
            with pytest.raises(CallTimeoutError):
                call.result()
            assert group.call("sleep", 0.5, tag=3, timeout=60).result() == [3, 3]


class TestErrors:
    def test_type_and_ranks(self, group):
        """A worker's exception keeps its type, and a note names each failing rank with where it is."""
        with pytest.raises(ValueError, match="would not") as caught:
            group.call("fail", [3]).result()
        notes = "\n".join(caught.value.__notes__)
        assert re.search(r"rank 3 \(dp=1, tp=2\) on node \w{8} \([\d.]+\), pid \d+", notes)

    def test_all_failing_ranks_are_listed(self, group):
        """Once all have failed, all are in the notes."""
        call = group.call("fail", [3, 6])
        assert call.wait(timeout=60)
        with pytest.raises(ValueError, match="would not") as caught:
            call.result()
        assert [re.search(r"rank (\d)", note)[1] for note in caught.value.__notes__] == ["3", "6"]

    def test_a_lost_worker(self, doomed):
        """The first loss ends the wait; outcomes tells of the others; a later call is refused at once."""
        call = doomed.call("die", [2])
        with pytest.raises(WorkerFailureError, match=r"rank 2 \(dp=1, tp=0\)"):
            call.result()
        errors = {outcome.rank: outcome.error for outcome in call.outcomes()}
        assert [rank for rank, error in errors.items() if error is not None] == [2]
        requests = doomed.statistics().requests
        with pytest.raises(WorkerFailureError):
            doomed.call("rank")
        assert doomed.statistics().requests == requests
        assert doomed.at(dp=0).call("rank").result() == [0, 1]


class TestCancel:
    def test_queued_is_dropped_running_runs_on(self, group):
        """What a rank has not started is never run; which ranks are running it is known exactly."""
        blocking = group.at(dp=0, tp=0).call("sleep", 2.0, tag="blocks 5")
        call = group.call("sleep", 1.5, ranks=[0, 5], tag="cancelled")
        time.sleep(0.3)
        assert call.cancel() == [0]
        with pytest.raises(CallCancelledError, match=r"the call of 'sleep' was cancelled before rank\(s\) 0, 5"):
            call.result()
        outcomes = {outcome.rank: outcome for outcome in call.outcomes(timeout=0)}
        assert outcomes[1].value == "cancelled"
        assert isinstance(outcomes[0].error, CallCancelledError)
        blocking.result()
        ran = group.call("what_ran").result()
        assert "cancelled" in ran[0]
        assert "cancelled" not in ran[5]
        assert group.call("rank").result() == list(range(8))

    def test_while_another_thread_waits(self, group):
        """Who waits for the result is told that it was cancelled, whatever became of its parts."""
        view = group.at(dp=0, tp=0)
        running, queued = view.call("sleep", 1.0), view.call("sleep", 1.0, tag="never")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(queued.result, 30)
            time.sleep(0.2)
            assert queued.cancel() == []
            with pytest.raises(CallCancelledError):
                waiting.result(timeout=30)
        running.result()

    def test_when_all_is_done(self, group):
        """There is nothing left to cancel, and the result stays."""
        call = group.call("rank")
        call.wait(30)
        assert call.cancel() == []
        assert call.result() == list(range(8))

    def test_with_force(self, doomed):
        """The workers that are running it are ended; the group has lost them, and says why."""
        call = doomed.call("sleep", 60, ranks=[1], tag=0)
        time.sleep(0.5)
        assert call.cancel(force=True) == [1]
        with pytest.raises(CallCancelledError):
            call.result()
        with pytest.raises(WorkerFailureError, match="cancelled: its call of 'sleep' was cancelled with force"):
            doomed.call("rank")
        assert doomed.at(dp=1).call("rank").result() == [2, 3]


class TestStreams:
    def test_items_by_arrival(self, group):
        """The items of all workers come interleaved, each with who made it, in its worker's own order."""
        outcomes = list(group.call("items", 3, pause_s=0.1).stream())
        assert sorted(outcome.value for outcome in outcomes) == [100 * rank + i for rank in range(8) for i in range(3)]
        assert {outcome.rank for outcome in outcomes[:8]} != {outcomes[0].rank}
        for rank in range(8):
            assert [o.value for o in outcomes if o.rank == rank] == [100 * rank + i for i in range(3)]

    def test_as_results(self, group):
        """result() has a list of items per answer; the classic path has them flat, or proxies."""
        call = group.call("items", 2, collect="dp")
        assert call.result() == call.result() == [[500, 501], [0, 1]]
        assert call.get_results() == [500, 501, 0, 1]
        proxies = group.call("items", 2, collect="dp").get_results(return_generators_as_proxies=True)
        assert [ray.get(ref) for ref in proxies[0]] == [500, 501]

    def test_items_are_handed_out_once(self, group):
        """What was streamed is not kept; streaming again goes on where it ended."""
        call = group.at(dp=0, tp=0).call("items", 4)
        stream = call.stream()
        assert [next(stream).value, next(stream).value] == [500, 501]
        assert [outcome.value for outcome in call.stream()] == [502, 503]

    def test_a_timeout_is_of_the_next_item(self, group):
        """A stream may last as long as it likes, as long as its items come."""
        view = group.at(dp=0, tp=0)
        assert [outcome.value for outcome in view.call("items", 4, pause_s=0.6).stream(timeout=1.5)] == [
            500,
            501,
            502,
            503,
        ]

    def test_errors(self, group, doomed):
        """An error in the middle comes at its place with its type; a worker's end is no quiet end of its stream."""
        stream = group.at(dp=0, tp=0).call("items_then_fail", 2).stream()
        assert [next(stream).value, next(stream).value] == [0, 1]
        with pytest.raises(KeyError, match="no more"):
            next(stream)
        with pytest.raises(KeyError, match="no more"):
            group.call("items_then_fail", 2).result()
        with pytest.raises(TypeError, match="'rank' is no generator method"):
            group.call("rank").stream()
        with pytest.raises(CallTimeoutError):
            list(group.at(dp=0, tp=0).call("items", 2, pause_s=1.0).stream(timeout=0.2))
        with pytest.raises(WorkerFailureError, match="rank 3"):
            list(doomed.call("items_then_die", [3]).stream())
        classic = doomed.at(dp=0).call("items_then_die", [1])
        with pytest.raises(WorkerFailureError, match="rank 1"):
            doomed.get_all_worker_results([classic.futures[1]])


class TestAsync:
    def test_one_at_a_time(self, group):
        """Without async_communication async methods run to their end, one after the other, and answer as others do."""
        assert group.call("slow_echo", "x").result() == ["x"] * 8

    def test_overlapping(self, local_ray):
        """With async_communication they overlap, are cancelled while they run, and all other kinds work as before."""
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Overlapping, async_communication=True) as group,
        ):
            waiting = group.call("wait_for_it")
            assert group.call("let_go").result() == ["went", "went"]  # while the other one runs
            assert waiting.result() == ["done", "done"]
            assert group.call("plain", 3).result() == [3, 3]
            assert group.call("items", 3).result() == [[0, 1, 2]] * 2
            assert group.call("async_items", 3).result() == [[0, 1, 2]] * 2
            assert group.call("async_items", 3, discard=True).result() is None
            assert group.call("plain", group.call("plain", 4)).result() == [[4, 4]] * 2
            assert group.call("late", group.call("plain", 4)).result() == [[4, 4]] * 2
            endless = group.call("forever")
            time.sleep(0.3)
            with pytest.raises(CallTimeoutError, match="in 'forever' for"):
                endless.result(timeout=0.1)
            endless.cancel()
            with pytest.raises(CallCancelledError):
                endless.result()
            assert group.call("cancelled").result() == [True, True]
            assert group.shutdown(cleanup_method="let_go")


class Overlapping:
    """A worker whose methods wait for each other."""

    def __init__(self):
        self.event = asyncio.Event()
        self.was_cancelled = False

    async def wait_for_it(self):
        await self.event.wait()
        return "done"

    async def let_go(self):
        self.event.set()
        return "went"

    async def forever(self):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def cancelled(self):
        return self.was_cancelled

    async def late(self, value):
        await asyncio.sleep(0.01)
        return value

    def plain(self, value):
        return value

    def items(self, count):
        yield from range(count)

    async def async_items(self, count):
        for i in range(count):
            await asyncio.sleep(0.001)
            yield i


class TestExplain:
    def test_table(self, group):
        """A dry run: who gets which piece, what would be stored, who answers at which place; nothing is sent."""
        before = group.statistics()
        told = group.explain("echo", Shard([np.ones(3), np.ones(3)], "dp"), "small", x=np.ones(2), collect=("dp",))
        assert group.statistics() == before
        assert told.summary == "echo: 8 of 8 workers called, 3 value(s) stored, 2 answer(s)"
        lines = str(told).splitlines()
        assert lines[1].split() == ["rank", "dp", "tp", "argument", "0", "argument", "1", "x", "answer"]
        assert lines[2].split() == ["0", "1", "0", "piece", "1", "with", "the", "call", "the", "same", "1"]
        assert lines[7].split()[:4] == ["5", "0", "0", "piece"]
        assert lines[7].split()[-1] == "0"
        assert repr(told) == str(told)
        assert told._repr_html_().count("<tr>") == 9
        assert "by reference" in str(group.explain("echo", ray.put(1)))
        assert "its own" in str(group.explain("echo", PerWorker([1] * 8)))

    def test_late_worker_text(self):
        """Without a record, a late worker's line says what is known."""
        assert str(LateWorker(3, {"dp": 1}, "ab" * 28, 77)) == "rank 3 (dp=1) on node abababab, pid 77"
