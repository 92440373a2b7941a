# SPDX-License-Identifier: Apache-2.0
"""What packages that are built on groups of workers use."""

import asyncio
import os
import time

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    CallTimeoutError,
    GroupHandle,
    RayWorkerBuilder,
    RayWorkerGroup,
    WorkerFailureError,
    WorkerGroupError,
    spi,
)
from fairlead_workergroup.testing import kill

from ..faults import installed_extensions

SLOTS = 2
pytestmark = pytest.mark.usefixtures("local_ray")


def wait_for(worker, gate):
    while not os.path.exists(gate):
        time.sleep(0.01)


class Worker:
    def __init__(self):
        self.running, self.most = 0, 0

    def value(self):
        return 7


class Overlapping(Worker):
    async def work(self, seconds):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1

    async def work_until(self, gate):
        self.running += 1
        while not os.path.exists(gate):
            await asyncio.sleep(0.01)
        self.running -= 1

    async def items(self, count):
        for number in range(count):
            self.running += 1
            await asyncio.sleep(0.01)
            self.running -= 1
            yield number


def send(group, function, *args, ranks=None, **options):
    snapshot = spi.read_members(group)
    pickled = ray.cloudpickle.dumps(function)
    chosen = range(group.world_size) if ranks is None else ranks
    return {
        rank: (snapshot[rank].process, spi.send_function(snapshot[rank], "a function", pickled, *args, **options))
        for rank in chosen
    }


def fail(worker):
    raise ArithmeticError("broken")


def test_functions_and_replies(gate, wait_until_running):
    """A function gets the user's instance; replies are values, the worker's own errors, losses, or late."""
    with RayVirtualCluster([3], use_gpus=False) as cluster:
        group = RayWorkerGroup(cluster, RayWorkerBuilder(Worker))
        before = spi.read_members(group)
        for options in ({}, {"alone_within_s": 60.0}):
            replies = spi.collect(group, send(group, lambda worker, x: worker.value() + x, 3, **options), 60)
            assert {rank: reply.value for rank, reply in replies.items()} == dict.fromkeys(range(3), 10)
            assert all(reply.is_good for reply in replies.values())
        (failed,) = spi.collect(group, send(group, fail, ranks=[1]), 30).values()
        assert isinstance(failed.error, ArithmeticError)
        assert failed.worker.rank == 1

        requests = send(group, wait_for, gate, ranks=[2])
        wait_until_running(group, "<function>", 2)
        (late,) = spi.collect(group, requests, 0.2).values()
        assert late.late.rank == 2
        assert late.late.method == "<function>"
        queued = send(group, lambda worker: setattr(worker, "seen", True), ranks=[2])
        time.sleep(0.3)  # long enough to reach the worker; the rest is right in any case
        spi.cancel(queued)
        gate.touch()
        (checked,) = spi.collect(group, send(group, lambda worker: hasattr(worker, "seen"), ranks=[2]), 60).values()
        assert checked.value is False

        kill(group, 0)
        replies = spi.collect(group, send(group, lambda worker: 1), 30, all_of_them=True)
        assert replies[0].failure.kind == "killed"
        assert replies[1].is_good
        assert replies[2].is_good
        after = spi.read_members(group)
        assert after.version > before.version
        assert after[0].failure is not None
        with pytest.raises(WorkerFailureError):
            group.call("value")
        group.shutdown()
        with pytest.raises(WorkerGroupError, match="has been shut down"):
            spi.read_members(group)


def test_function_that_has_an_asyncio_worker_for_itself(gate, wait_until_running):
    """Methods that run end first, later ones wait; one that takes too long keeps the function from running."""

    async def alone(worker):
        seen = worker.running
        await asyncio.sleep(0.1)
        return seen, worker.running

    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Overlapping), async_communication=True) as group,
    ):
        calls = [group.call("work", 0.05) for _ in range(20)]
        calls.append(group.call("items", 20))
        requests = [send(group, alone, alone_within_s=60.0) for _ in range(3)]
        calls += [group.call("work", 0.05) for _ in range(20)]
        for request in requests:
            assert spi.collect(group, request, 60)[0].value == (0, 0)
        for call in calls:
            call.result(timeout=60)
        assert group.call(lambda worker: worker.most, collect=()).result() > 1

        slow = group.call("work_until", gate)
        wait_until_running(group, "work_until", 0)
        (reply,) = spi.collect(group, send(group, alone, alone_within_s=0.1), 60).values()
        assert isinstance(reply.error, TimeoutError)
        assert "1 methods were still running" in str(reply.error)
        gate.touch()
        slow.result()
        assert spi.collect(group, send(group, fail, alone_within_s=60.0), 60)[0].error.args == ("broken",)
        assert group.call("value").result() == [7]


class Observed(spi.CallObserver):
    """Records what the group reports."""

    def __init__(self):
        self.told = []

    def begin(self, name, began, futures):
        self.told.append((name, len(futures)))
        return len(self.told)

    def end(self, numbers, *, failed=False):
        self.told.append((*numbers, failed))

    def mark(self, text):
        self.told.append(text)

    def explain(self, error):
        error.add_note("as the observer says")


def test_extension(gate, caplog):
    """An extension observes the calls and spans of a group from its start, and runs code in its workers.

    One that cannot be imported, and one that fails, are reported once, and others go on.
    """

    def start(on_call, on_step):
        import os

        os.environ["CALLS"] = "0"
        on_call.append(lambda number, *_: os.environ.update(CALLS=str(number)))

    def fail_to_start(on_call, on_step):
        raise KeyError("in the worker")

    def extend(group, group_id):
        assert group_id == "" or len(group_id) == 32
        spi.observe_calls(group, Observed() if isinstance(group, GroupHandle) else observed)
        if isinstance(group, RayWorkerGroup):
            spi.on_worker_start(group, fail_to_start)
            spi.on_worker_start(group, start)

    def miss():
        raise ImportError("no such module")

    def fail_to_extend(group, group_id):
        failed.append(group_id)
        raise KeyError(group_id)

    observed, failed = Observed(), []
    with (
        installed_extensions(missing=miss, failing=lambda: fail_to_extend, good=lambda: extend),
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker) as group,
    ):
        assert group.call(lambda worker: os.environ["CALLS"]).result() == ["1"]  # the constructor
        with spi.record_span("transfer", group):
            pass
        assert observed.told[1:] == [(1, False), ("transfer", 0), (3, False)]
        late = group.handle().call(wait_for, gate, timeout=0.1)
        with pytest.raises(CallTimeoutError) as caught:
            late.result()
        assert caught.value.__notes__[-1] == "as the observer says"
        gate.touch()
        late.wait()
        assert len(observed.told) == 4
        kill(group, 0)
        with pytest.raises(WorkerFailureError) as lost:
            group.call("value").result()
        assert "as the observer says" in lost.value.__notes__
        assert "rank 0 lost: killed" in observed.told
        assert spi.publication_of(group)().members[0].rank == 0
    assert len(failed) == 1  # and not for the handle
    assert [record.getMessage() for record in caplog.records if "extension" in record.getMessage()] == [
        "The extension package:missing of worker groups cannot be imported.",
        "The extension package:failing of worker groups failed. It is not used any more.",
    ]


class Failing(Observed):
    """An observer that fails at the end of a call."""

    def end(self, numbers, *, failed=False):
        raise OSError("no memory")


def test_observer_that_fails(caplog, gate):
    """An observer that raises is reported once and dropped; calls go on without it."""
    observer, opened = Failing(), __file__
    with (
        installed_extensions(),
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker) as group,
    ):
        group.call(wait_for, opened).result()  # which nobody observes
        spi.observe_calls(group, observer)
        with pytest.raises(ValueError, match="observed by"):
            spi.observe_calls(group, Failing())
        call = group.call(wait_for, gate)
        with pytest.raises(CallTimeoutError):
            call.result(timeout=0.05)
        assert observer.told == [("wait_for", 2)]
        assert not caplog.records
        gate.touch()
        assert call.result() == [None] * 2
        assert group.call(wait_for, opened).result() == [None] * 2
        group._sender.observed.mark("rank 1 lost")
    assert observer.told == [("wait_for", 2)]
    assert caplog.text.count("does not observe the calls of its group any more") == 1


class Refused(WorkerGroupError):
    pass


def test_check_calls(shared_cluster, puts, requests):
    """A package refuses calls of some ranks, before they are stored or sent, until it ends that."""
    refused, asked = {1}, []

    def check(method, ranks):
        asked.append((method, list(ranks)))
        if refused.intersection(ranks):
            raise Refused(f"rank(s) {sorted(refused.intersection(ranks))} must not run {method!r}")

    with RayWorkerGroup(shared_cluster, Worker, [2]) as group:
        end = spi.check_calls(group, check)
        puts.clear()
        with pytest.raises(Refused, match="must not run 'value'"):
            group.call("value")
        with pytest.raises(Refused):
            group.run_all_workers_single_data("value")
        assert (puts, requests) == ([], [])
        assert group.get_all_worker_results([group.run_single_worker_single_data("value", 0)]) == [7]
        refused.clear()
        assert group.call("value").result() == [7, 7]
        assert asked[-2:] == [("value", [0, 1])] * 2  # before it was stored, and when it was sent
        refused.add(0)
        end()
        end()
        assert group.call("value").result() == [7, 7]


def test_add_state(shared_cluster):
    """`inspect` shows what packages know of a group, each under a key of its own, until they end that."""
    group = RayWorkerGroup(shared_cluster, Worker, [1])
    end = spi.add_state(group, "weights", lambda: {"version": 3})
    with pytest.raises(ValueError, match="shows something under 'weights' already"):
        spi.add_state(group, "weights", dict)
    assert group.inspect().shown == {"weights": {"version": 3}}
    assert "weights=" in group.inspect()._repr_html_()
    end()
    end()
    assert group.inspect().shown == {}
    spi.add_state(group, "weights", dict)
    group.shutdown()
    assert group.inspect().shown == {}
