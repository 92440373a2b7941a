# SPDX-License-Identifier: Apache-2.0
"""Tests of waiting for a call, also in a coroutine, of its errors, and of its cancellation."""

import asyncio
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    CallCancelledError,
    CallTimeoutError,
    MultiWorkerFuture,
    PerWorker,
    RayWorkerGroup,
    WorkerFailureError,
)
from fairlead_workergroup._observe import query as _inspect

from ..calling import MB, Worker


class TestWaiting:
    def test_a_timeout_consumes_nothing(self, group):
        """After a timeout the same call can be asked again and returns its result."""
        call = group.call("sleep", 1.0, tag="t")
        with pytest.raises(CallTimeoutError):
            call.result(timeout=0.2)
        assert not call.done()
        assert call.result() == ["t"] * 8
        assert call.done()

    def test_late_workers_and_their_methods(self, group):
        """The deadline of a call names the ranks that have not finished, and the method that each of them runs."""
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
        """Each worker has an outcome, also those that failed, and nothing is raised."""
        outcomes = group.call("fail", [1, 6]).outcomes()
        assert [outcome.rank for outcome in outcomes] == list(range(8))
        assert [outcome.value for outcome in outcomes] == ["fine" if r not in (1, 6) else None for r in range(8)]
        assert [type(outcome.error) for outcome in outcomes if outcome.error] == [ValueError, ValueError]
        assert outcomes[6].coords == {"dp": 0, "tp": 2}
        silent = group.call("fail", [6], collect="dp").outcomes()
        assert [(outcome.rank, outcome.value) for outcome in silent] == [(5, "fine"), (0, "fine"), (6, None)]

    def test_as_completed(self, group):
        """Iteration yields the quick workers first."""
        ranks = [outcome.rank for outcome in group.call("sleep", 0.7, ranks=[0, 5])]
        assert sorted(ranks[:6]) == [1, 2, 3, 4, 6, 7]
        assert sorted(ranks[6:]) == [0, 5]
        with pytest.raises(CallTimeoutError):
            list(group.call("sleep", 1.0, ranks=[3], timeout=0.2))

    def test_await_and_async_for(self, group):
        """A coroutine gets results, outcomes as they complete, errors and deadlines while the loop keeps running."""

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

    def test_a_late_argument(self, group, doomed, request):
        """A call that waits for the result of another call names that call, its group, and the late ranks."""
        if request.node.callspec.params == {"group": "ray", "doomed": "lane"}:
            pytest.skip("a call by Ray is sent when the answers of lanes that are its arguments have arrived")
        made = doomed.call("sleep", 3.0, ranks=[2], tag="made")
        expected = (
            r"does not exist yet, from the call of 'sleep' of group 'Worker', not finished by:\n"
            r"  rank 2 \(dp=1, tp=0\) on node \w{8}, pid \d+: in 'sleep' for \d"
        )
        for view, argument in [(group, made), (group.at(dp=0), PerWorker(made))]:
            call = view.call("echo", argument)
            with pytest.raises(CallTimeoutError, match=expected) as caught:
                call.result(timeout=0.4)
            assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason
        plain = group.call("echo", made.futures[2])
        with pytest.raises(CallTimeoutError, match="from a call of group 'Worker', not finished by:\n  rank 2 "):
            plain.result(timeout=0.2)
        assert plain.result(timeout=60) == [(("made",), {})] * 8
        with pytest.raises(CallTimeoutError) as caught:
            # The arguments of finished workers are freed.
            group.at(dp=0).call("sleep", 1.5, [5], PerWorker(doomed.call("rank")), timeout=0.8).result()
        assert ([late.rank for late in caught.value.late], caught.value.reason) == ([5], "")

    def test_a_head_that_hangs(self, group, monkeypatch, eventually, stop_process):
        """A timeout is raised although Ray's head does not answer; it cannot name the methods of the late workers."""
        monkeypatch.setattr(_inspect, "ANSWER_S", 0.5)
        head = ray._private.worker._global_node.all_processes["gcs_server"][0].process.pid
        call = group.call("sleep", 3.0, ranks=[5], timeout=0.5)
        assert eventually(lambda: len(call._execution.pending()) == 1)
        with stop_process(head), pytest.raises(CallTimeoutError) as caught:
            call.result()
        assert [(late.rank, late.method) for late in caught.value.late] == [(5, None)]
        assert eventually(call.done)

    def test_storing_an_argument_delays_no_other_thread(self, group):
        """While one thread stores a value, the call of another thread is sent."""
        storing, stored = threading.Event(), threading.Event()

        class Slow:
            def __reduce__(self):
                storing.set()
                assert stored.wait(60)
                return str, ("slow",)

        with ThreadPoolExecutor() as pool:
            slow = pool.submit(group.call, "echo", Slow())
            assert storing.wait(60)
            try:
                assert group.call("rank", timeout=20).result() == list(range(8))
            finally:
                stored.set()
            assert slow.result(timeout=60).result() == [(("slow",), {})] * 8

    def test_slow_calls_are_logged(self, group, caplog, monkeypatch):
        """A call without a deadline logs the ranks that it waits for at intervals."""
        monkeypatch.setattr("fairlead_workergroup._calls.results.REPORT_EVERY_S", 0.3)
        assert group.call("sleep", 1.0, ranks=[2], tag=1).result() == [1] * 8
        assert "1 of 8 workers have not finished 'sleep'" in caplog.text
        assert "rank 2 (dp=0, tp=3)" in caplog.text

    def test_statistics(self, group):
        """A call counts its requests, puts and bytes, and the time of its sending."""
        call = group.call("total", np.ones(MB))
        call.result()
        statistics = call.statistics()
        assert (statistics.requests, statistics.puts, statistics.fetched) == (8, 1, 8)
        assert 0 < statistics.submit_s < 60
        assert repr(call) == "Call('total', 8 of 8 workers done, 8 results)"

    def test_group_timeout(self, local_ray):
        """`call_timeout_s` is the timeout of calls without one of their own."""
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Worker, call_timeout_s=0.3) as group,
        ):
            call = group.call("sleep", 1.5, tag=2)
            with pytest.raises(CallTimeoutError):
                call.result()
            assert group.call("sleep", 0.5, tag=3, timeout=60).result() == [3, 3]
            self.check_classic_methods(group)

    def check_classic_methods(self, group):
        """The deadline of refs counts from their call; of refs that the group did not make, from the wait."""
        refs = group.run_all_workers_single_data("sleep", 1.5, ranks=[1], tag=4)
        with pytest.raises(CallTimeoutError, match="1 of 2 workers have not finished 'sleep'") as caught:
            group.get_all_worker_results(refs)
        assert [late.rank for late in caught.value.late] == [1]
        for future in (MultiWorkerFuture(refs), group.run_all_workers_single_data("items", 2)):
            with pytest.raises(CallTimeoutError):
                group.get_all_worker_results(future)
        with pytest.raises(CallTimeoutError, match="1 of 1 workers") as caught:
            group.get_all_worker_results([group.workers[1].what_ran.remote()])
        assert [late.rank for late in caught.value.late] == [1]
        ray.wait(refs, num_returns=2, timeout=60)
        assert group.get_all_worker_results(refs) == [4, 4]  # nothing was lost


class TestErrors:
    def test_type_and_ranks(self, group):
        """A worker's exception keeps its type, and a note names each failed rank with its coordinates and node."""
        with pytest.raises(ValueError, match="would not") as caught:
            group.call("fail", [3]).result()
        notes = "\n".join(caught.value.__notes__)
        assert re.search(r"rank 3 \(dp=1, tp=2\) on node \w{8} \([\d.]+\), pid \d+", notes)

    def test_all_failing_ranks_are_listed(self, group):
        """Once all workers have failed, the notes name all of them."""
        call = group.call("fail", [3, 6])
        assert call.wait(timeout=60)
        with pytest.raises(ValueError, match="would not") as caught:
            call.result()
        assert [re.search(r"rank (\d)", note)[1] for note in caught.value.__notes__] == ["3", "6"]

    def test_a_lost_worker(self, doomed):
        """The first loss ends the wait; `outcomes` reports the others; a later call is refused at once."""
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

    def test_deaths_that_are_not_the_workers(self, group, doomed):
        """An error of a method about its own dead actor or a lost argument is not a loss of its worker."""
        with pytest.raises(ActorDiedError) as caught:
            group.call("lose_a_child", [3]).result()
        assert [re.search(r"rank (\d)", note)[1] for note in caught.value.__notes__] == ["3"]
        answer = doomed.at(dp=0, tp=0).call("die", [0], collect=())
        with pytest.raises(ActorDiedError):
            group.call("echo", answer).result()
        assert [status.state for status in group.get_worker_status()] == ["idle"] * 8
        assert group.call("rank").result() == list(range(8))


class TestCancel:
    def test_a_call_that_waits_for_an_argument(self, group):
        """A call that Ray has not delivered, as its argument is not ready, is dropped and delays no later call."""
        argument = group.at(dp=1, tp=3).call("sleep", 1.5, collect=())
        call = group.at(dp=0, tp=0).call("echo", argument)
        assert call.cancel() == []
        assert group.at(dp=0, tp=0).call("rank", collect=()).result(timeout=10) == 5
        with pytest.raises(CallCancelledError):
            call.result()

    def test_queued_requests_are_dropped(self, group):
        """A queued request is never run, and `cancel` returns exactly the ranks that run the method."""
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

    def test_by_cancelling_the_task(self, group):
        """Cancelling `await call`, as a timeout does, cancels the call; under `asyncio.shield` it continues."""
        view = group.at(dp=0, tp=0)
        running, queued, shielded = (view.call("sleep", 1.0, tag=tag) for tag in ("running", "dropped", "shielded"))

        async def main():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(shielded), 0.01)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await queued
            assert await shielded == ["shielded"]

        asyncio.run(main())
        with pytest.raises(CallCancelledError):
            queued.result()
        assert running.result() == ["running"]
        assert "dropped" not in view.call("what_ran").result()[0]

    def test_while_another_thread_waits(self, group):
        """A thread that waits for the result gets CallCancelledError, whatever the outcomes of the workers."""
        view = group.at(dp=0, tp=0)
        running, queued = view.call("sleep", 1.0), view.call("sleep", 1.0, tag="never")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(queued.result, 30)
            time.sleep(0.2)
            assert queued.cancel() == []
            with pytest.raises(CallCancelledError):
                waiting.result(timeout=30)
        running.result()

    def test_a_finished_call(self, group):
        """A finished call has nothing to cancel, and keeps its result."""
        call = group.call("rank")
        call.wait(30)
        assert call.cancel() == []
        assert call.result() == list(range(8))

    def test_with_force(self, doomed):
        """The workers that run the method are killed; the group has lost them and reports the reason."""
        call = doomed.call("sleep", 60, ranks=[1], tag=0)
        time.sleep(0.5)
        assert call.cancel(force=True) == [1]
        with pytest.raises(CallCancelledError):
            call.result()
        with pytest.raises(WorkerFailureError, match="cancelled: its call of 'sleep' was cancelled with force"):
            doomed.call("rank")
        assert doomed.at(dp=1).call("rank").result() == [2, 3]
