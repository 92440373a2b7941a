# SPDX-License-Identifier: Apache-2.0
"""Tests of waiting for a call, also in a coroutine, of its errors, and of its cancellation."""

import asyncio
import pickle
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.exceptions import RayActorError

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    CallCancelledError,
    CallTimeoutError,
    MultiWorkerFuture,
    PerWorker,
    RayWorkerGroup,
    Timeouts,
    WorkerFailureError,
    WorkerGroupError,
)

from ..calling import Worker
from ..faults import act_before_a_call_is_sent, changing, find_unfinished, report_late_workers_every


class TestWaiting:
    def test_a_call_that_waits_for_its_turn_on_an_event_loop(self, group):
        """On an event loop, a call whose turn has not come is sent later, with its arguments."""

        async def run():
            with changing(group):
                call = group.call("echo", PerWorker(list(range(8))))
                assert call.sending is not None
            return await call

        assert asyncio.run(run()) == [((rank,), {}) for rank in range(8)]

    def test_a_classic_call_on_an_event_loop(self, group):
        """While a change begins an epoch, a classic call does not block the loop: it is sent later, or refused."""

        async def run():
            with changing(group):
                call = group.run_all_workers_sharded_data("rank")
                with pytest.raises(CallTimeoutError, match="'rank' was not sent to its 8 workers"):
                    group.run_all_workers_single_data("rank")
            return await call

        assert asyncio.run(run()) == [5]

    def test_an_exception_of_a_signal_handler(self, group, monkeypatch):
        """It reaches the code that makes the call, also while the call is being sent, and the group stays usable."""

        def interrupt(number, frame):
            raise LookupError("of the handler")

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with monkeypatch.context() as patch:
                act_before_a_call_is_sent(patch, lambda: signal.raise_signal(signal.SIGALRM))
                with pytest.raises(LookupError, match="of the handler"):
                    group.call("rank")
        finally:
            signal.signal(signal.SIGALRM, before)
        assert group.call("rank").result() == list(range(8))

    def test_a_call_of_a_signal_handler(self, group, monkeypatch):
        """A call that a signal handler makes while its thread sends one is refused, and does not wait for itself."""
        refused = []

        def call_again():
            with pytest.raises(WorkerGroupError, match="Set a flag in the handler") as caught:
                group.call("rank")
            refused.append(caught.value)

        with monkeypatch.context() as patch:
            act_before_a_call_is_sent(patch, call_again)
            assert group.call("rank").result() == list(range(8))
        assert len(refused) == 1

    def test_order_of_a_loop_and_a_thread(self, group):
        """A call that a loop made while a change began an epoch runs before a later one of a thread."""

        async def run(threads):
            with changing(group):
                first = group.call("sleep", 0, (), "of the loop")
                later = threads.submit(lambda: group.call("sleep", 0, (), "of the thread").result())
                time.sleep(0.2)  # long enough for that thread to wait; the rest is right in any case
            return await first, await asyncio.wrap_future(later)

        with ThreadPoolExecutor() as threads:
            asyncio.run(run(threads))
        assert [ran[-2:] for ran in group.call("what_ran").result()] == [["of the loop", "of the thread"]] * 8

    def test_a_timeout_consumes_nothing(self, group, gate):
        """After a timeout the call can be asked again; a timeout of the wait holds in place of that of the call."""
        call = group.call("wait_for", gate, tag="t", timeout=0.2)
        for timeout in (None, 0.0):
            with pytest.raises(CallTimeoutError):
                call.result(timeout)
        assert not call.done()
        gate.touch()
        assert call.result(timeout=60) == ["t"] * 8
        assert call.done()

    @pytest.mark.smoke
    def test_late_workers_and_their_methods(self, group, gate, eventually, wait_until_running):
        """The deadline of a call names the ranks that have not finished, and the method that each of them runs."""
        slow = group.at(dp=0, tp=1).call("wait_for", gate, tag="a")
        wait_until_running(group, "wait_for", 1)
        call = group.call("rank", timeout=0.2)
        assert eventually(lambda: find_unfinished(call) == [1], 60)
        with pytest.raises(CallTimeoutError, match="1 of 8 workers have not finished 'rank'") as caught:
            call.result()
        (late,) = caught.value.late
        assert (late.rank, late.coords, late.method) == (1, {"dp": 0, "tp": 1}, "wait_for")
        assert late.running_s > 0
        assert re.search(r"rank 1 \(dp=0, tp=1\) on node \w+, pid \d+: in 'wait_for' for \d", str(caught.value))
        assert isinstance(caught.value, TimeoutError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.late) == (str(caught.value), caught.value.late)
        outcomes = call.outcomes()
        assert [outcome.value for outcome in outcomes if outcome.error is None] == [0, 2, 3, 4, 5, 6, 7]
        assert isinstance(outcomes[1].error, CallTimeoutError)
        gate.touch()
        slow.result()
        assert eventually(call.done, 60)  # its deadline is over: it is not waited for any more
        assert call.result() == list(range(8))  # nothing was lost

    @pytest.mark.smoke
    def test_outcomes(self, group):
        """Each worker has an outcome, also those that failed, and nothing is raised."""
        outcomes = group.call("fail", [1, 6]).outcomes()
        assert [outcome.rank for outcome in outcomes] == list(range(8))
        assert [outcome.value for outcome in outcomes] == ["fine" if r not in (1, 6) else None for r in range(8)]
        assert [type(outcome.error) for outcome in outcomes if outcome.error] == [ValueError, ValueError]
        assert outcomes[6].coords == {"dp": 0, "tp": 2}
        silent = group.call("fail", [6], collect="dp").outcomes()
        assert [(outcome.rank, outcome.value) for outcome in silent] == [(5, "fine"), (0, "fine"), (6, None)]

    def test_as_completed(self, group, gate):
        """Iteration yields the quick workers while others still work."""
        outcomes = iter(group.call("wait_for", gate, ranks=[0, 5]))
        assert sorted(next(outcomes).rank for _ in range(6)) == [1, 2, 3, 4, 6, 7]
        late = group.call("wait_for", gate, ranks=[3], timeout=0.2)
        with pytest.raises(CallTimeoutError):
            list(late)
        gate.touch()
        assert sorted(outcome.rank for outcome in outcomes) == [0, 5]

    def test_await_and_async_for(self, group, tmp_path):
        """A coroutine gets results, outcomes as they complete, errors and deadlines while the loop keeps running."""

        async def main():
            gates = [tmp_path / str(number) for number in range(3)]

            async def open_gate():
                await asyncio.sleep(0)
                gates[0].touch()

            waiting = group.call("wait_for", gates[0], tag="x")
            opening = asyncio.create_task(open_gate())  # it runs while the next line waits
            assert await waiting == ["x"] * 8
            await opening
            assert await group.call("rank", collect=()) == 5
            assert await group.call("items", 2, collect="dp") == [[500, 501], [0, 1]]
            outcomes = aiter(group.call("wait_for", gates[1], ranks=[4]))
            assert sorted([(await anext(outcomes)).rank for _ in range(7)]) == [0, 1, 2, 3, 5, 6, 7]
            gates[1].touch()
            assert [outcome.rank async for outcome in outcomes] == [4]
            with pytest.raises(ValueError, match="rank 2 would not") as caught:
                await group.call("fail", [2])
            assert "rank 2 (dp=0, tp=3)" in caught.value.__notes__[0]
            assert [type(o.error) async for o in group.call("fail", [2], collect=()) if o.rank == 2] == [ValueError]
            late = group.call("wait_for", gates[2], timeout=0.2, tag="y")
            with pytest.raises(CallTimeoutError):
                await late
            gates[2].touch()
            results = await asyncio.gather(*(group.call("rank", collect=()) for _ in range(20)))
            assert results == [5] * 20

        asyncio.run(main())

    def test_slow_calls_are_logged(self, group, gate, caplog, monkeypatch, eventually):
        """A call without a deadline logs the ranks that it waits for at intervals."""
        report_late_workers_every(monkeypatch, 0.1)

        def open_when_logged():
            try:
                return eventually(lambda: "1 of 8 workers have not finished 'wait_for'" in caplog.text, 60)
            finally:
                gate.touch()

        with ThreadPoolExecutor() as threads:
            logged = threads.submit(open_when_logged)
            assert group.call("wait_for", gate, ranks=[2], tag=1).result() == [1] * 8
            assert logged.result()
        assert "rank 2 (dp=0, tp=3)" in caplog.text

    def test_group_timeout(self, local_ray, tmp_path):
        """`Timeouts.call_s` is the timeout of calls without one of their own."""
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Worker, timeouts=Timeouts(call_s=0.3)) as group,
        ):
            first, second = tmp_path / "first", tmp_path / "second"
            call = group.call("wait_for", first, tag=2)
            with pytest.raises(CallTimeoutError):
                call.result()
            first.touch()
            assert group.call("sleep", 0.5, tag=3, timeout=60).result() == [3, 3]
            try:
                self.check_classic_methods(group, second)
            finally:
                second.touch()

    def check_classic_methods(self, group, gate):
        """Refs have the group's timeout from the wait on, whoever has made them."""
        refs = group.run_all_workers_single_data("wait_for", gate, ranks=[1], tag=4)
        assert ray.wait(refs, timeout=60)[0] == refs[:1]
        with pytest.raises(CallTimeoutError, match="1 of 2 workers have not finished 'a method'") as caught:
            group.get_all_worker_results(refs)
        assert [(late.rank, late.method) for late in caught.value.late] == [(1, "wait_for")]
        for future in (MultiWorkerFuture(refs), group.run_all_workers_single_data("items", 2)):
            with pytest.raises(CallTimeoutError):
                group.get_all_worker_results(future)
        with pytest.raises(CallTimeoutError, match="1 of 1 workers") as caught:
            group.get_all_worker_results([group.workers[1].what_ran.remote()])
        assert [late.rank for late in caught.value.late] == [1]
        gate.touch()
        ray.wait(refs, num_returns=2, timeout=60)
        assert group.get_all_worker_results(refs) == [4, 4]  # nothing was lost


class TestErrors:
    def test_all_failing_ranks_are_listed(self, group):
        """Once all workers have failed, the notes name all of them."""
        call = group.call("fail", [3, 6])
        assert call.wait(timeout=60)
        with pytest.raises(ValueError, match="would not") as caught:
            call.result()
        assert [re.search(r"rank (\d)", note)[1] for note in caught.value.__notes__] == ["3", "6"]

    @pytest.mark.smoke
    def test_a_lost_worker(self, doomed, requests):
        """The first loss ends the wait; `outcomes` reports the others; a later call is refused at once."""
        call = doomed.call("die", [1])
        with pytest.raises(WorkerFailureError, match=r"rank 1 \(dp=1, tp=0\)"):
            call.result()
        errors = {outcome.rank: outcome.error for outcome in call.outcomes()}
        assert [rank for rank, error in errors.items() if error is not None] == [1]
        requests.clear()
        with pytest.raises(WorkerFailureError):
            doomed.call("rank")
        assert requests == []
        assert doomed.at(dp=0).call("rank").result() == [0]

    def test_deaths_that_are_not_the_workers(self, group, doomed):
        """An error of a method about its own dead actor or a lost argument is not a loss of its worker."""
        with pytest.raises(RayActorError) as caught:
            group.call("lose_a_child", [3]).result()
        assert [re.search(r"rank (\d)", note)[1] for note in caught.value.__notes__] == ["3"]
        answer = doomed.at(dp=0).call("die", [0], collect=())
        with pytest.raises(RayActorError):
            group.call("echo", answer).result()
        assert [status.state for status in group.get_worker_status()] == ["idle"] * 8
        assert group.call("rank").result() == list(range(8))


class TestCancel:
    def test_a_call_that_waits_for_an_argument(self, group, gate):
        """A call that Ray has not delivered, as its argument is not ready, is dropped and delays no later call."""
        argument = group.at(dp=1, tp=3).call("wait_for", gate, collect=())
        call = group.at(dp=0, tp=0).call("echo", argument)
        assert call.cancel() == []
        later = group.at(dp=0, tp=0).call("rank", collect=())
        gate.touch()
        assert later.result(timeout=60) == 5
        with pytest.raises(CallCancelledError):
            call.result()

    def test_queued_requests_are_dropped(self, group, gate, eventually, wait_until_running):
        """A queued request is never run, and `cancel` returns exactly the ranks that run the method."""
        blocking = group.at(dp=0, tp=0).call("wait_for", gate, tag="blocks 5")
        call = group.call("wait_for", gate, ranks=[0, 5], tag="cancelled")
        wait_until_running(group, "wait_for", 0, 5)
        assert eventually(lambda: find_unfinished(call) == [0, 5], 60)
        assert call.cancel() == [0]
        with pytest.raises(CallCancelledError, match=r"the call of 'wait_for' was cancelled before rank\(s\) 0, 5"):
            call.result()
        outcomes = {outcome.rank: outcome for outcome in call.outcomes(timeout=0)}
        assert outcomes[1].value == "cancelled"
        assert isinstance(outcomes[0].error, CallCancelledError)
        gate.touch()
        blocking.result()
        ran = group.call("what_ran").result()
        assert "cancelled" in ran[0]
        assert "cancelled" not in ran[5]
        assert group.call("rank").result() == list(range(8))

    def test_by_cancelling_the_task(self, group, gate):
        """Cancelling `await call`, as a timeout does, cancels the call; under `asyncio.shield` it continues."""
        view = group.at(dp=0, tp=0)
        running, queued, shielded = (view.call("wait_for", gate, tag=tag) for tag in ("running", "dropped", "shielded"))

        async def main():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(shielded), 0.01)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await queued
            gate.touch()
            assert await shielded == ["shielded"]

        asyncio.run(main())
        with pytest.raises(CallCancelledError):
            queued.result()
        assert running.result() == ["running"]
        assert "dropped" not in view.call("what_ran").result()[0]

    def test_while_another_thread_waits(self, group, gate):
        """A thread that waits for the result gets CallCancelledError, whatever the outcomes of the workers."""
        view = group.at(dp=0, tp=0)
        running, queued = view.call("wait_for", gate), view.call("wait_for", gate, tag="never")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(queued.result, 60)
            time.sleep(0.2)  # long enough for that thread to wait; the rest is right in any case
            assert queued.cancel() == []
            gate.touch()
            with pytest.raises(CallCancelledError):
                waiting.result(timeout=60)
        running.result()

    def test_an_item_that_waits_to_be_sent(self, group, gate, wait_until_running):
        """If a task is cancelled while an item of its map waits for a change of the group, no worker runs the item."""
        blocking = group.call("wait_for", gate)
        wait_until_running(group, "wait_for", *range(8))

        async def give_up():
            with changing(group):
                items = group.map(lambda worker, item: worker.ran.append(item), ["given up"])
                waiting = asyncio.ensure_future(anext(items))
                await asyncio.sleep(0.2)  # long enough for its thread to wait; the rest is right in any case
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting

        asyncio.run(give_up())  # until that thread has sent the item, and cancelled it
        gate.touch()
        blocking.result()
        assert not any("given up" in ran for ran in group.call("what_ran").result())

    def test_with_force(self, doomed, eventually, wait_until_running):
        """The workers that run the method are killed; the group has lost them and reports the reason."""
        call = doomed.call("sleep", 600, ranks=[1], tag=0)
        wait_until_running(doomed, "sleep", 1)
        assert eventually(lambda: find_unfinished(call) == [1], 60)
        assert call.cancel(force=True) == [1]
        with pytest.raises(CallCancelledError):
            call.result()
        with pytest.raises(WorkerFailureError, match="cancelled: its call of 'sleep' was cancelled with force"):
            doomed.call("rank")
        assert doomed.at(dp=0).call("rank").result() == [0]
        assert doomed.restart_failed_workers() == [1]
