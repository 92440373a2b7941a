# SPDX-License-Identifier: Apache-2.0
"""Tests of a lane: its order, references, faults, keys, and the calls that leave it."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import LaneError, RayWorkerGroup, Restart, WorkerFailureError
from fairlead_workergroup.testing import kill

from ..lanes import (
    WINDOW,
    act_at_each_look,
    act_in_waits,
    connect_stranger,
    list_ranks_that_have_greeted,
    list_ranks_that_serve,
)

pytestmark = pytest.mark.nightly


class Worker:
    def __init__(self):
        self.seen = []

    def pid(self):
        return os.getpid()

    def add(self, value):
        self.seen.append(value)

    def all_seen(self):
        return self.seen

    def echo(self, value):
        return value

    def size(self, value):
        return value.nbytes

    def total(self, values):
        return sum(value.nbytes for value in values)

    def make(self, count):
        return np.ones(count)

    def make_reference(self):
        return [ray.put(np.ones(50_000))]

    def keep(self, references):
        self.kept = references[0]

    def read_kept(self):
        return float(ray.get(self.kept).sum())

    def fail_with_reference(self):
        raise HoldingError(ray.put(np.ones(50_000)))

    def items(self, count, size=1):
        for _ in range(count):
            yield np.ones(size)

    def endless(self):
        while True:
            yield 1

    def wait_for(self, gate):
        while not os.path.exists(gate):
            time.sleep(0.01)

    def give_up(self):
        os._exit(1)


class HoldingError(Exception):
    """An exception that holds a reference."""


class AsyncWorker:
    def __init__(self):
        self.running = 0
        self.noted = []

    async def note(self, value):
        self.noted.append(value)

    async def get_noted(self, references):
        return self.noted

    async def overlap(self, count):
        """Wait until so many calls of this method have begun."""
        self.running += 1
        async with asyncio.timeout(60):
            while self.running < count:
                await asyncio.sleep(0.01)
        return self.running

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

    async def stream(self, count):
        for i in range(count):
            await asyncio.sleep(0)
            yield i

    def plain(self):
        return os.getpid()


@pytest.fixture(scope="module")
def group(local_ray):
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, sharding_annotations=NamedSharding.from_shape(worker=2)) as made,
    ):
        yield made


@pytest.fixture
def lane(group):
    with group.lane():
        yield group


class TestCalls:
    @pytest.mark.smoke
    def test_order(self, lane):
        """Each worker runs the calls in the order in which they were made, also those that leave the lane."""
        for i in range(100):
            lane.call("add", i if i % 10 else ray.put(i))
        lane.call("add", [ray.put(1)])
        lane.call("add", 100)
        assert all(seen[:100] == list(range(100)) and seen[101] == 100 for seen in lane.call("all_seen").result())

    def test_route(self, group):
        """`explain` and `inspect` say which way a call goes, and why it leaves the lane."""
        assert group.at().explain("echo", 1).route == "ray"
        with group.lane():
            plain, nested = group.call("echo", 1), group.call("echo", [ray.put(1)])
            assert (plain.statistics().route, nested.statistics().route) == ("lane", "ray")
            assert group.at().explain("echo", 1).route == "lane"
            left = group.at().explain("echo", [ray.put(1)])
            assert (left.route, "holds references" in left.summary) == ("ray", True)
            assert plain.result() == [1] * 2
        assert group.call("echo", 1).statistics().route == "ray"
        statistics = group.inspect().statistics
        assert statistics.lane_requests >= 2
        assert statistics.lane_fallbacks >= 1

    def test_large_values(self, lane):
        """Large arguments and answers go through the object store, and back into other calls."""
        values = lane.call("make", 100_000)
        assert lane.call("total", values).result() == [1_600_000] * 2
        assert [len(value) for value in values.result()] == [100_000] * 2
        assert lane.call("size", np.ones(100_000)).result() == [800_000] * 2

    @pytest.mark.smoke
    def test_answers_as_arguments(self, lane):
        """An answer goes to other workers as an argument, whether it came with the message or is stored."""
        for count in (10, 100_000):
            one = lane.at(worker=1).call("make", count, collect=())
            assert lane.call("size", one).result() == [8 * count] * 2

    def test_generators(self, lane):
        """Items stream in order, small ones and large ones, and a generator that nobody reads goes on."""
        items = [outcome.value.size for outcome in lane.at(worker=1).call("items", 300, collect=()).stream()]
        assert items == [1] * 300
        assert [len(item) for item in lane.at(worker=1).call("items", 3, size=50_000, collect=()).result()] == [
            50_000
        ] * 3

    def test_refs(self, lane):
        """`refs` are references that any process can get."""
        assert ray.get(lane.call("echo", 7).refs) == [7] * 2

    def test_nested_opening(self, lane):
        """Opening a lane that is open does nothing; the outer context closes it."""
        with lane.lane():
            assert lane.call("echo", 1).statistics().route == "lane"
        assert lane.call("echo", 1).statistics().route == "lane"

    def test_direct_calls(self, lane):
        """A Ray call of an actor is refused while the lane is open, instead of waiting behind it."""
        with pytest.raises(LaneError, match="serve a lane"):
            lane.workers[1].echo.remote(1)

    def test_await(self, lane):
        """Coroutines get answers, errors and items."""

        async def main():
            values = await asyncio.gather(*(lane.call("echo", i) for i in range(5)))
            items = [one.value.size async for one in lane.at(worker=0).call("items", 3, collect=()).stream()]
            return values, items

        assert asyncio.run(main()) == ([[i] * 2 for i in range(5)], [1, 1, 1])


class TestReferences:
    def test_nothing_is_left(self, lane, eventually, store_used):
        """400 calls with references in arguments, answers and exceptions leave the store as it was."""
        counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
        large = np.ones(50_000)

        def run(times):
            for _ in range(times):
                one = lane.at(worker=0)
                assert one.call("echo", [ray.put(1)], collect=()).result()
                assert one.call("make_reference", collect=()).result()
                assert one.call("size", large, collect=()).result() == 400_000
                with pytest.raises(HoldingError):
                    one.call("fail_with_reference").result()

        run(5)
        gc.collect()
        before, used = len(counts()), store_used()
        run(100)
        gc.collect()
        assert eventually(lambda: len(counts()) <= before + 5, 60)
        assert eventually(lambda: store_used() <= used + 1_000_000, 60)

    def test_kept_reference(self, lane):
        """A reference that a worker keeps stays valid after the call."""
        lane.call("keep", [ray.put(np.ones(50_000))]).result()
        for _ in range(3):
            lane.call("echo", np.ones(50_000)).result()
        gc.collect()
        assert lane.call("read_kept").result() == [50_000.0] * 2

    def test_answer_outlives_its_worker(self, lone_group):
        """A stored answer belongs to the driver."""
        with lone_group.lane():
            call = lone_group.call("make", 100_000)
            call.wait()
            kill(lone_group, 0)
            assert [len(value) for value in call.result()] == [100_000]


@pytest.fixture
def lone_group(local_ray):
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        yield group


class TestFaults:
    @pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
    def test_error_in_the_block(self, group, gate, monkeypatch, error):
        """An error leaves the block of a lane without a wait for workers that hang."""
        waits = []

        def open_and_fail():
            with group.lane(timeout=600):
                group.at(worker=0).call("wait_for", gate, collect=())
                act_in_waits(monkeypatch, lambda lane, timeout_s: waits.append(timeout_s))
                raise error

        with pytest.raises(error):
            open_and_fail()
        gate.touch()
        assert not any(waits)

    def test_death(self, lone_group):
        """The death of a worker is reported as without a lane, and later calls are refused."""
        with lone_group.lane():
            with pytest.raises(WorkerFailureError) as caught:
                lone_group.call("give_up").result(timeout=60)
            assert caught.value.failures[0].kind == "killed"
            with pytest.raises(WorkerFailureError):
                lone_group.call("pid").result(timeout=60)

    def test_restart(self, local_ray):
        """A restarted worker joins the lane."""
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Worker, restart=Restart(on_failure=True)) as group,
            group.lane(),
        ):
            before = group.call("pid").result()
            kill(group, 0)
            call = group.call("pid", retries=1, timeout=120)
            after = call.result()
            assert after[0] != before[0]
            again = group.call("pid")
            assert (again.result(), again.statistics().route) == (after, "lane")

    def test_resize(self, local_ray):
        """New workers join the lane, and those that leave end."""
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Worker, [1]) as group,
            group.lane(),
        ):
            pids = group.call("pid").result(timeout=60)
            group.resize(worker=2, timeout=60)
            grown = group.call("pid")
            assert (grown.result(timeout=60)[:1], grown.statistics().route) == (pids, "lane")
            group.resize(worker=1, timeout=60)
            assert group.call("pid").result(timeout=60) == pids

    def test_stopped_worker(self, group, stop_process):
        """The driver keeps a bounded number of messages under way to a stopped worker, and refuses more in time."""
        with group.lane():
            pid = group.at(worker=0).call("pid", collect=()).result()
            with stop_process(pid):
                calls = [group.at(worker=0).call("echo", i, collect=()) for i in range(200)]
                assert not calls[-1].wait(timeout=0.5)
            assert [call.result(timeout=60) for call in calls] == list(range(200))

    def test_late_worker(self, group, tmp_path, clock, monkeypatch):
        """Opening and closing name the worker that does not follow, and the group works afterwards."""
        opening, closing = tmp_path / "opening", tmp_path / "closing"
        slow = group.at(worker=1).call("wait_for", opening, collect=())
        with monkeypatch.context() as patch:
            act_at_each_look(patch, lambda lane: clock.skip(600 * (0 in list_ranks_that_have_greeted(lane))))
            with pytest.raises(LaneError) as caught, group.lane(timeout=600):
                pass
        assert caught.value.ranks == (1,)
        opening.touch()
        slow.result()
        with monkeypatch.context() as patch:
            act_at_each_look(patch, lambda lane: clock.skip(600 * (list_ranks_that_serve(lane) == [0])))
            with pytest.raises(LaneError) as caught, group.lane(timeout=600):
                late = group.at(worker=0).call("wait_for", closing, collect=())
        assert caught.value.ranks == (0,)
        monkeypatch.undo()
        closing.touch()
        assert late.result(timeout=60) is None
        assert len(group.call("pid").result(timeout=60)) == 2
        with group.lane():
            assert group.call("echo", 1).result() == [1, 1]

    def test_cancel(self, group, gate):
        """A call that waits behind another one is dropped."""
        with group.lane():
            first = group.call("wait_for", gate)
            second = group.call("add", "dropped")
            assert second.cancel() == []
            gate.touch()
            first.result()
            assert not any("dropped" in seen for seen in group.call("all_seen").result())

    def test_shutdown_inside(self, lone_group):
        """The end of the group inside a lane runs the cleanup, and leaves nothing behind."""
        with lone_group.lane():
            lone_group.call("echo", 1).result()
            assert lone_group.shutdown("all_seen")

    def test_driver_that_dies(self, local_ray, tmp_path, eventually):
        """The workers of a driver that is killed end."""
        script = tmp_path / "driver.py"
        script.write_text(DRIVER)
        command = [sys.executable, script, ray.get_runtime_context().gcs_address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            pids = list(map(int, process.stdout.readline().split()))
            assert len(pids) == 1
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
        assert eventually(lambda: not any(map(psutil.pid_exists, pids)), 60.0)


DRIVER = """
import os, sys, time
from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_workergroup import RayWorkerGroup

class Worker:
    def pid(self):
        return os.getpid()

init_ray(address=sys.argv[1])
with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group, group.lane():
    print(*group.call("pid").result(), flush=True)
    time.sleep(600)
"""


class TestKeys:
    @pytest.mark.parametrize("keys", ["none", "wrong client", "wrong server"])
    def test_strangers(self, lane, keys):
        """Nobody without the keys of the lane is heard, and the group goes on."""
        config = lane._sender.transport._router.config(b"stranger")
        with connect_stranger(config, keys) as monitor:
            for i in range(20):
                assert lane.call("echo", i).result() == [i] * 2
            assert not monitor.poll(500)

    def test_garbage_and_replay(self, lane):
        """Bytes that are not of the protocol, and messages that have been sent before, change nothing."""
        import socket

        own = lane._sender.transport
        host, port = own._router.config(b"").address.removeprefix("tcp://").rsplit(":", 1)
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(os.urandom(4096))
            session, sent = own._sessions[0], []
            send = session.send_frames
            before = lane.call("all_seen").result()
            session.send_frames = lambda identity, message: sent.append(message) or send(identity, message)
            lane.call("add", "once").result()
            session.send_frames = send
            own._do(lambda: [send(session.identity, message) for message in sent])
            assert lane.call("all_seen").result()[0] == [*before[0], "once"]


@pytest.fixture(scope="class")
def async_group(local_ray):
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, AsyncWorker, async_communication=True) as group,
    ):
        yield group


class TestOverlap:
    def test_order(self, async_group):
        """A worker begins a call that leaves the lane after all earlier calls, also those that wait in the driver."""
        released = threading.Event()
        with async_group.lane():
            one = async_group.at(worker=0)
            async_group._target.sender.transport._do(lambda: released.wait(60))  # so that nothing is sent
            for i in range(WINDOW + 20):
                one.call("note", i)
            threading.Timer(0.5, released.set).start()
            left = one.call("get_noted", [ray.put(1)], collect=())
            assert released.is_set()
            assert left.statistics().route == "ray"
            one.call("note", "later")
            assert left.result(timeout=60) == list(range(WINDOW + 20))
            assert one.call("get_noted", [], collect=()).result(timeout=60)[-1] == "later"

    def test_async_workers(self, async_group):
        """Async methods overlap in the lane; their streams, and a cancelled coroutine, end."""
        group = async_group
        with group.lane():
            calls = [group.call("overlap", 5) for _ in range(5)]
            assert calls[0].statistics().route == "lane"
            assert [call.result(timeout=60) for call in calls] == [[5, 5]] * 5
            assert group.call("stream", 100).result(timeout=60) == [list(range(100))] * 2
            late = group.call("sleep", 600)
            assert not late.wait(timeout=0.5)
            late.cancel()
            assert len(group.call("plain").result(timeout=60)) == 2
