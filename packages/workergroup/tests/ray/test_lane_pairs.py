# SPDX-License-Identifier: Apache-2.0
"""A lane together with everything else: changes of the members, faults, other processes, and looks at the workers."""

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_placement.spi import find_agents, read_boards, run_on_agents
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    CallTimeoutError,
    Elastic,
    RayWorkerBuilder,
    RayWorkerGroup,
    Restart,
    WorkerFailureError,
    WorkerGroupError,
    attach,
    current_worker,
)
from fairlead_workergroup.testing import kill

from ..faults import most_calls_of_a_lane
from ..slow_agents import delay, stop_delay

pytestmark = pytest.mark.nightly

MB = 1_000_000
SLOTS = 4


class Worker:
    """A worker that notes what it has run."""

    def __init__(self, value=None):
        self.value = value
        self.seen = []

    def facts(self):
        worker = current_worker()
        return worker.rank, worker.epoch, self.value

    def pid(self):
        return os.getpid()

    def add(self, item, seconds=0.0):
        time.sleep(seconds)
        self.seen.append(item)
        return item

    def take_seen(self):
        seen, self.seen = self.seen, []
        return seen

    def rejoin(self):
        self.seen.append("rejoin")

    def second(self, first, second):
        return second

    def wait_for(self, path):
        while not os.path.exists(path):
            time.sleep(0.02)

    def grow(self, size):
        self.block = b"x" * size
        time.sleep(30)


@pytest.fixture(scope="module")
def pair(local_ray):
    """Return a group of two workers, which tests leave as it was."""
    with (
        RayVirtualCluster([2], use_gpus=False) as reserved,
        RayWorkerGroup(reserved, Worker, name_prefix="pair") as group,
    ):
        yield group


def by_lane(call):
    """Return the results of a call, which must have gone by the lane."""
    assert call.statistics().route == "lane"
    return call.result(timeout=60)


class TestMembership:
    def test_resize(self, shared_cluster):
        """Calls in flight, and those of another thread, run once each while the group grows and shrinks."""
        slots, axes = shared_cluster.slots(), NamedSharding.from_shape(dp=2)
        stop = threading.Event()

        def call_often(group):
            count = 0
            while not stop.is_set():
                assert len(group.call("pid").result(timeout=60)) in (1, 2, 3)
                count += 1
            return count

        with (
            RayWorkerGroup(slots[:2], Worker, sharding_annotations=axes, elastic=Elastic(on_resize="rejoin")) as group,
            group.lane(),
            ThreadPoolExecutor() as threads,
        ):
            calling = threads.submit(call_often, group)
            try:
                before = [group.call("add", i, seconds=0.002) for i in range(100)]
                group.resize(dp=3, slots=slots[2:3], timeout=60)
                assert [call.result(timeout=60) for call in before] == [[i] * 2 for i in range(100)]
                assert [facts[:2] for facts in by_lane(group.call("facts"))] == [(0, 1), (1, 1), (2, 1)]
                between = [group.call("add", i, seconds=0.002) for i in range(100, 200)]
                group.resize(dp=1, timeout=60)
                assert [call.result(timeout=60) for call in between] == [[i] * 3 for i in range(100, 200)]
            finally:
                stop.set()
            assert calling.result(60) > 0
            seen = [*range(100), "rejoin", *range(100, 200), "rejoin"]
            assert by_lane(group.call("take_seen")) == [seen]

    def test_replace_and_restart(self, shared_cluster):
        """A rank that moves, and one that is restarted, join the lane; calls in flight end before."""
        options = {"workers_per_node": [2]}
        with RayWorkerGroup(shared_cluster, RayWorkerBuilder(Worker, []), **options) as group, group.lane():
            before = group.call("pid").result(timeout=60)
            calls = [group.call("add", i, seconds=0.002) for i in range(100)]
            group.replace([1], timeout=60)
            assert [call.result(timeout=60) for call in calls] == [[i] * 2 for i in range(100)]
            after = by_lane(group.call("pid"))
            assert (after[0], after[1] == before[1]) == (before[0], False)
            assert by_lane(group.call("facts")) == [(0, 1, []), (1, 1, [])]
            kill(group, 0)
            with pytest.raises(WorkerFailureError):
                group.call("pid").result(timeout=60)
            assert group.restart_failed_workers() == [0]
            assert by_lane(group.call("facts")) == [(0, 2, []), (1, 2, [])]
            assert by_lane(group.call("pid"))[1] == after[1]


class TestLeavingTheLane:
    def test_late_answer(self, pair, tmp_path):
        """A call that leaves the lane waits for an answer that it gets; others go on, and its deadline holds."""
        references = [ray.put(1)]
        with pair.lane(), ThreadPoolExecutor() as threads:
            source = pair.at(worker=0).call("wait_for", str(tmp_path / "go"), collect=())
            target = pair.at(worker=1)
            with pytest.raises(CallTimeoutError, match="has not arrived"):
                target.call("second", references, source, timeout=0.2)
            waiting = threads.submit(lambda: target.call("second", references, source, collect=()).result(60))
            time.sleep(0.3)  # long enough for that thread to wait; the rest is right in any case
            assert len(by_lane(target.call("pid", timeout=60))) == 1

            async def call():
                first = target.call("second", references, source, collect=())
                (tmp_path / "go").touch()
                return await first

            assert asyncio.run(call()) is None
            assert waiting.result(60) is None


class TestOtherProcesses:
    def test_handle(self, pair):
        """An attached process gets an error at once while a lane is open, and calls the workers again afterwards."""

        @ray.remote(num_cpus=0)
        class Controller:
            def __init__(self, handle):
                self.handles = [handle, attach("pair")]

            def call(self):
                answers = []
                for handle in self.handles:
                    try:
                        answers.append(handle.call("pid").result(timeout=60))
                    except WorkerGroupError as error:
                        answers.append(str(error))
                return answers

        pids = pair.call("pid").result()
        controller = Controller.remote(pair.handle())
        assert ray.get(controller.call.remote()) == [pids] * 2
        for _ in range(2):
            with pair.lane():
                assert all("has an open lane" in text for text in ray.get(controller.call.remote()))
                assert by_lane(pair.call("pid")) == pids
            assert ray.get(controller.call.remote()) == [pids] * 2
        ray.kill(controller)

    def test_slow_agent(self, pair):
        """When a lane is open, and when it is closed, others learn so at once, even from an agent that is slow."""

        @ray.remote(num_cpus=0)
        def read_lanes():
            boards = read_boards(find_agents(), timeout_s=60).values()
            return [value["lane"] for board in boards for value in board.values() if value["name"] == "pair"]

        agents = find_agents()
        run_on_agents(delay, dict.fromkeys(agents, ("publish", 1.0)), timeout_s=60)
        try:
            for _ in range(2):
                with pair.lane():
                    assert ray.get(read_lanes.remote()) == [True]
                assert ray.get(read_lanes.remote()) == [False]
        finally:
            run_on_agents(stop_delay, dict.fromkeys(agents, ("publish",)), timeout_s=60)
        assert pair.handle().call("pid").result(timeout=60) == pair.call("pid").result()

    def test_inspection(self, pair, tmp_path, eventually):
        """While a call hangs in a lane, its worker is named as without one."""
        with pair.lane():
            call = pair.call("wait_for", str(tmp_path / "go"))
            try:
                assert eventually(lambda: [one.state for one in pair.get_worker_status()] == ["busy"] * 2)
                assert [one.method for one in pair.get_worker_status()] == ["wait_for"] * 2
                assert eventually(lambda: [one.rank for one in pair.detect_stuck_workers(0.5)] == [0, 1])
                assert "in wait_for" in pair.detect_stuck_workers(0.5)[0].stacks
                assert not call.wait(timeout=0)
            finally:
                (tmp_path / "go").touch()
            assert call.result(timeout=60) == [None] * 2


class TestFaults:
    def test_kill(self, shared_cluster, eventually):
        """The calls of a killed worker say so, the others' are answered, and the restarted worker joins the lane."""
        options = {
            "restart": Restart(on_failure=True, max_restarts=10),
            "memory_limit": "600MB",
            "workers_per_node": [2],
        }
        with RayWorkerGroup(shared_cluster, Worker, **options) as group:
            pids = group.call("pid").result(timeout=60)

            def check_recovery():
                """The next call restarts rank 1 alone, and goes by the lane."""
                assert by_lane(group.call("pid", retries=3, timeout=60))[0] == pids[0]
                after = by_lane(group.call("pid"))
                assert (after[0], after[1] == pids[1]) == (pids[0], False)
                pids[1] = after[1]

            with group.lane():  # before the first call
                kill(group, 1)
                check_recovery()
                kill(group, 1)  # while it is idle
                check_recovery()
                first = group.call("add", 1)
                running = group.at(worker=1).call("add", 2, seconds=600.0)
                behind = group.call("add", 3)
                assert first.result(timeout=60) == [1, 1]
                assert eventually(lambda: group.get_worker_status()[1].state == "busy")
                kill(group, 1)
                for call in (running, behind):
                    with pytest.raises(WorkerFailureError) as caught:
                        call.result(timeout=60)
                    assert [(one.rank, one.kind) for one in caught.value.failures] == [(1, "killed")]
                check_recovery()
                with pytest.raises(WorkerFailureError) as caught:
                    group.at(worker=1).call("grow", 800 * MB).result(timeout=60)
                (failure,) = caught.value.failures
                assert (failure.rank, failure.kind) == (1, "out-of-memory")
                assert "memory_limit" in failure.cause
                check_recovery()
            assert group.call("take_seen").result(timeout=60) == [[1, 3], []]

    def test_stopped_worker(self, pair, stop_process):
        """Of 10,000 calls to a stopped worker each runs once; deadlines hold, and the driver's memory is limited."""
        one = pair.at(worker=0)
        assert pair.call("take_seen").result(timeout=60)
        with pair.lane(), ThreadPoolExecutor() as threads:
            pid = by_lane(one.call("pid", collect=()))
            with stop_process(pid):
                used = psutil.Process().memory_info().rss
                late = one.call("add", 0, timeout=1.0)
                most = most_calls_of_a_lane()
                calls = [one.call("add", i, collect=(), timeout=600) for i in range(1, most)]
                with pytest.raises(CallTimeoutError) as caught:
                    late.result()
                assert [worker.rank for worker in caught.value.late] == [0]
                # A further call is refused at its deadline, and has not been sent.
                with pytest.raises(CallTimeoutError, match="10,000 earlier calls"):
                    one.call("add", most, timeout=0.3)
                gc.collect()
                # A thread that waits without a deadline does not keep others from calling other workers.
                waiting = threads.submit(lambda: one.call("add", "waited", collect=()).result())
                time.sleep(0.3)
                assert len(by_lane(pair.at(worker=1).call("pid", timeout=60))) == 1
                assert not waiting.done()
                assert psutil.Process().memory_info().rss - used < 200 * MB
            assert [call.result(timeout=120) for call in calls] == list(range(1, most))
            assert waiting.result(60) == "waited"
            assert by_lane(one.call("take_seen", collect=())) == [*range(most), "waited"]
