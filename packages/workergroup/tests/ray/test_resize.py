# SPDX-License-Identifier: Apache-2.0
"""Groups grow and shrink along their slowest-varying axis while calls go on."""

import asyncio
import copy
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from fairlead_placement import ResourceInsufficientError
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    Elastic,
    PerWorker,
    RayWorkerBuilder,
    RayWorkerGroup,
    ResizeTimeoutError,
    Restart,
    Shard,
    StaleGroupError,
    Timeouts,
    WorkerFailureError,
    WorkerGroupError,
    WorkerStartError,
    current_worker,
)
from fairlead_workergroup.testing import kill

from ..calling import wait_until_published
from ..faults import (
    act_before_calls_are_awaited,
    act_while_a_change_awaits,
    report_late_workers_every,
)

AXES = NamedSharding.from_shape(dp=2)
GRID = NamedSharding.from_shape(dp=2, tp=2)


class Worker:
    """A worker that remembers the facts with which it has set itself up."""

    def __init__(self):
        self.seen = []
        self.started = current_worker().group_epoch
        if os.path.exists(os.environ.get("FAIL_TO_START", "")):
            raise OSError("no room")
        hold = f"{os.environ.get('GATE', '')}.start{current_worker().rank}"
        while os.path.exists(hold):
            Path(f"{hold}.begun").touch()
            time.sleep(0.02)

    def set_up(self):
        self.seen.append(self.facts())
        gate = os.environ.get("GATE", "")
        rank = current_worker().rank
        if os.path.exists(f"{gate}.fail{rank}"):
            raise OSError("no peers")
        while os.path.exists(f"{gate}.hang{rank}"):
            time.sleep(0.02)

    def facts(self):
        worker, env = current_worker(), os.environ
        assert (int(env["RANK"]), int(env["WORLD_SIZE"])) == (worker.rank, worker.world_size)
        assert worker.sharding.size == worker.world_size
        return worker.group_epoch, worker.world_size, int(env["MASTER_PORT"]), int(env["LOCAL_WORLD_SIZE"])

    def history(self):
        return self.seen

    def rank(self):
        return current_worker().rank

    def sleep(self, seconds):
        time.sleep(seconds)
        return current_worker().group_epoch

    def wait_for(self, path):
        while not os.path.exists(path):
            time.sleep(0.02)
        return current_worker().group_epoch

    def add(self, value):
        return current_worker().rank, value


def make(cluster, **options):
    options = {"sharding_annotations": AXES, "elastic": Elastic(on_resize="set_up"), "workers_per_node": [2], **options}
    return RayWorkerGroup(cluster, Worker, **options)


def make_lasting(cluster):
    return make(cluster, restart=Restart(max_restarts=100))


@pytest.fixture
def group(lasting):
    """Return a group of two workers, which other tests have changed, and may change."""
    lasting.resize(dp=2)
    return lasting


@pytest.mark.smoke
def test_grow_and_shrink(cluster):
    """Workers that stay keep their process; everybody gets the new facts, and the group's own follow."""
    with make(cluster, sharding_annotations=GRID, workers_per_node=[4]) as group:
        pids = [one.pid for one in group.get_worker_status()]
        port, first, last = group.master_port, group.at(dp=0), group.at(dp=1)
        rest, pair = group.at(dp=slice(1, None)), group.at(dp=slice(0, 2))
        call = group.call("facts")
        assert (group.state().group_epoch, call.group_epoch, {facts[0] for facts in call.result()}) == (0, 0, {0})

        assert group.resize(dp=3) == group.state().group_epoch == 1
        assert (group.world_size, group.sharding_annotations.shape) == (6, {"dp": 3, "tp": 2})
        assert group.sharding_annotations.layout.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert group.master_port != port
        call = group.call("facts")
        assert call.result() == [(1, 6, group.master_port, 6)] * 6
        assert call.group_epoch == 1
        assert [len(history) for history in group.call("history").result()] == [1] * 6
        statuses = group.get_worker_status()
        assert [one.pid for one in statuses][:4] == pids
        assert statuses[5].coords == {"dp": 2, "tp": 1}
        assert len(group.workers) == len(group.worker_metadata) == 6
        assert group.call("add", Shard([10, 20, 30], "dp"), collect="dp").result() == [(0, 10), (2, 20), (4, 30)]
        assert (first.ranks, last.ranks, rest.ranks, pair.ranks) == ([0, 1], [2, 3], [2, 3, 4, 5], [0, 1, 2, 3])
        added = group.at(dp=2)
        assert added.call("rank").result() == [4, 5]

        assert group.resize(dp=1) == 2
        assert group.call("facts").result() == [(2, 2, group.master_port, 2)] * 2
        assert first.call("rank").result() == [0, 1]
        for view, reason in ((last, "Coordinate 1 is outside"), (added, "Coordinate 2 is outside"), (rest, "nothing")):
            with pytest.raises(StaleGroupError, match=rf"{reason}.* resized to \{{'dp': 1") as caught:
                view.call("rank")
            assert caught.value.epoch == 2
        assert pair.call("rank").result() == [0, 1]  # the part of its slice that is there
        assert len(group.workers) == len(group.get_worker_status()) == 2
        assert group.run_all_workers_single_data("rank")
        with pytest.raises(IndexError, match="has ranks 0 to 1"):
            group.run_single_worker_single_data("rank", 3)

        assert group.resize(dp=4) == 3
        assert added.call("rank").result() == [4, 5]
        assert [one.incarnation for one in group.get_worker_status()] == [0, 0, 1, 1, 1, 1, 0, 0]
        assert group.call("facts").result() == [(3, 8, group.master_port, 8)] * 8


def test_calls_while_a_worker_starts(cluster, tmp_path, eventually):
    """Calls go on while a resize waits for the constructor of a new worker."""
    hold = tmp_path / "gate.start2"
    hold.touch()
    with make(cluster, env_vars={"GATE": f"{tmp_path}/gate"}) as group, ThreadPoolExecutor() as threads:
        resized = threads.submit(group.resize, dp=3)
        assert eventually((tmp_path / "gate.start2.begun").exists, 60)
        assert group.call("facts", timeout=60).result() == [(0, 2, group.master_port, 2)] * 2
        assert not resized.done()
        hold.unlink()
        assert resized.result() == 1
        assert group.call("facts").result() == [(1, 3, group.master_port, 3)] * 3


def test_calls_of_an_event_loop(group):
    """Calls that an event loop makes while the group is resized are planned again, but for those with pieces."""

    async def main():
        resizes = asyncio.create_task(asyncio.to_thread(lambda: [group.resize(dp=size) for size in (3, 2, 3, 2)]))
        sizes = set()
        while not resizes.done():
            result = await group.call("add", 1)
            assert result == [(rank, 1) for rank in range(len(result))]
            sizes.add(len(result))
        await resizes
        return sizes

    assert asyncio.run(main()) >= {2, 3}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_late_on_restart(cluster, tmp_path, clock, monkeypatch, eventually, wait_until_running):
    """The timeout holds for `Restart.method` of a lost worker that the resize starts again."""
    hang = tmp_path / "gate.hang0"
    hang.touch()
    options = {
        "restart": Restart(method="set_up"),
        "elastic": Elastic(on_resize=None),
        "timeouts": Timeouts(start_s=1200),
        "env_vars": {"GATE": f"{tmp_path}/gate"},
    }
    report_late_workers_every(monkeypatch, 0.1)
    with make(cluster, **options) as group:
        kill(group, 0)

        def let_time_pass():
            wait_until_running(group, "set_up", 0)
            clock.skip(600)

        with ThreadPoolExecutor() as threads:
            passed = threads.submit(let_time_pass)
            with pytest.raises(WorkerFailureError, match=r"Restart\.method failed") as caught:
                group.resize(dp=1, timeout=600)
            passed.result()
        assert [failure.rank for failure in caught.value.failures] == [0]
        hang.unlink()
        assert group.restart_failed_workers() == [0]
        assert [facts[:2] for facts in group.call("facts").result()] == [(2, 1)]


def test_bad_input_is_refused(cluster, monkeypatch, requests):
    """Nothing changes when a resize is refused."""
    with make(cluster, sharding_annotations=NamedSharding([[0], [1]], ["dp", "tp"])) as group:
        for sizes, error, match in [
            ({}, ValueError, "one axis with its new size"),
            ({"dp": 1, "tp": 1}, ValueError, "one axis with its new size"),
            ({"pp": 2}, ValueError, "pp"),
            ({"tp": 4}, ValueError, "along 'dp' only"),
            ({"dp": 0}, ValueError, "at least 1"),
            ({"dp": 2.0}, TypeError, "whole number"),
            ({"dp": True}, TypeError, "whole number"),
            ({"dp": 9}, ValueError, r"7 more worker\(s\) need as many free slots, and there are 6.*slots="),
        ]:
            with pytest.raises(error, match=match):
                group.resize(**sizes)
        for wrong in (5, "ab", ["a", "b"]):
            with pytest.raises(TypeError, match="slots must be a sequence of slots"):
                group.resize(dp=3, slots=wrong)
        slots = cluster.slots()
        with pytest.raises(ValueError, match=r"needs 1 slot\(s\), got 2"):
            group.resize(dp=3, slots=slots[6:])
        with pytest.raises(ValueError, match="needs 0 slot"):
            group.resize(dp=1, slots=slots[7:])
        with pytest.raises(ValueError, match=r"bundle 1 .* has a worker of this group"):
            group.resize(dp=3, slots=slots[1:2])
        with RayWorkerGroup(slots[7:], Worker, name_prefix="other"):
            with pytest.raises(ResourceInsufficientError, match="other"):
                group.resize(dp=3, slots=slots[7:])
            with pytest.raises(ValueError, match="there are 5 that can be used"):
                group.resize(dp=8)
        assert group.resize(dp=2) == 0
        assert (group.state().group_epoch, requests) == (0, [])
        assert group.resize(dp=3, slots=slots[7:]) == 1
        assert [one["bundle_index"] for one in group.worker_metadata][2:] == [7]
    with pytest.raises(Exception, match="shut down"):
        group.resize(dp=1)


def test_mesh_without_a_slowest_axis(cluster):
    """Ranks are identities, so a mesh whose ranks are not in the order of its coordinates keeps its size."""
    axes = NamedSharding([1, 0], ["dp"])
    with make(cluster, sharding_annotations=axes) as group, pytest.raises(ValueError, match="slowest-varying axis"):
        group.resize(dp=3)


def test_failed_start_changes_nothing(cluster, tmp_path):
    """When a new worker cannot start, the group goes on as before, and its slots and ports are free again."""
    fail = tmp_path / "fail"
    with make(cluster, env_vars={"FAIL_TO_START": str(fail)}) as group:
        port, pids = group.master_port, [one.pid for one in group.get_worker_status()]
        fail.touch()
        with pytest.raises(WorkerStartError, match="no room"):
            group.resize(dp=3)
        assert (group.state().group_epoch, group.master_port, group.world_size) == (0, port, 2)
        assert [one.pid for one in group.get_worker_status()] == pids
        assert group.call("facts").result() == [(0, 2, port, 2)] * 2
        fail.unlink()
        assert group.resize(dp=3) == 1


@pytest.fixture
def skip_wait_for(clock, monkeypatch):
    """Return a function that lets ten minutes pass whenever a change waits for this rank alone."""
    return lambda rank: act_while_a_change_awaits(monkeypatch, [rank], lambda: clock.skip(600))


def test_timeout_changes_nothing(cluster, tmp_path, skip_wait_for):
    """A call that is still running at the deadline keeps the resize from beginning, and its rank is named."""
    with make(cluster) as group:
        held = group.at(dp=0).call("wait_for", str(tmp_path / "go"))
        skip_wait_for(0)
        for size in (1, 3):
            with pytest.raises(ResizeTimeoutError, match=r"(?s)nothing has changed.*rank 0 \(dp=0\).*wait_for"):
                group.resize(dp=size, timeout=600)
        assert (group.state().group_epoch, group.world_size) == (0, 2)
        (tmp_path / "go").touch()
        assert held.result() == [0]
        # A rank that leaves is ended at the deadline.
        held = group.at(dp=1).call("wait_for", str(tmp_path / "never"))
        skip_wait_for(1)
        assert group.resize(dp=1, timeout=600) == 1
        with pytest.raises(WorkerFailureError, match=r"left the group, resized to \{'dp': 1\} in epoch 1"):
            held.result(timeout=60)


@pytest.mark.parametrize("how", ["die", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("fail", "hang"))])
def test_broken_epoch_and_its_repair(cluster, tmp_path, how, skip_wait_for, wait_until_running):
    """After a failure in the second phase no call is sent until the failed ranks have been started again."""
    gate = tmp_path / "gate"
    with make(cluster, env_vars={"GATE": str(gate)}) as group, ThreadPoolExecutor() as threads:
        marker = tmp_path / f"gate.{'hang' if how == 'die' else how}1"
        marker.touch()
        if how == "die":
            threads.submit(lambda: (wait_until_running(group, "set_up", 1), kill(group, 1)))
        elif how == "hang":
            skip_wait_for(1)
        with pytest.raises(WorkerFailureError, match="did not complete a resize") as caught:
            group.resize(dp=3, timeout=600)
        assert [failure.rank for failure in caught.value.failures] == [1]
        assert caught.value.failures[0].kind == ("killed" if how == "die" else "resize-failed")
        with pytest.raises(WorkerFailureError, match="restart_failed_workers"):
            group.at(dp=0).call("rank")
        marker.unlink()
        if how == "fail":
            assert group.resize(dp=2) == 2
            repaired = group.call("facts").result()
            assert repaired == [(2, 2, group.master_port, 2)] * 2
            return
        port = group.master_port
        assert group.restart_failed_workers() == [1]
        assert group.master_port != port
        assert group.call("facts").result() == [(2, 3, group.master_port, 3)] * 3
        assert [history[-1] for history in group.call("history").result()] == group.call("facts").result()


def test_interrupted_wait(group, gate, monkeypatch):
    """Ctrl-C ends the wait for a resize, which runs to its end, and the next call waits for it."""
    epoch, held = group.state().group_epoch, group.call("wait_for", gate)
    main = threading.main_thread().ident
    act_before_calls_are_awaited(monkeypatch, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        group.resize(dp=3)
    gate.touch()
    assert group.call("facts").result() == [(epoch + 1, 3, group.master_port, 3)] * 3
    assert held.result() == [epoch] * 2


def test_call_of_a_finalizer(group, monkeypatch):
    """A call that a finalizer makes on the thread of a change is refused at once: the change would wait for itself."""
    refused = []

    def call():
        with pytest.raises(WorkerGroupError, match="finalizer") as caught:
            group.call("rank")
        refused.append(caught.value)

    act_before_calls_are_awaited(monkeypatch, call)
    group.resize(dp=3)
    assert len(refused) == 1


def test_two_resizes_at_once(group, gate, monkeypatch):
    """The second one waits, or raises by its timeout."""
    waits = threading.Event()
    act_before_calls_are_awaited(monkeypatch, waits.set)
    epoch, held = group.state().group_epoch, group.call("wait_for", gate)
    first = threading.Thread(target=group.resize, kwargs={"dp": 3})
    first.start()
    assert waits.wait(120)
    with pytest.raises(ResizeTimeoutError, match="Another thread resizes the group"):
        group.resize(dp=1, timeout=0.1)
    gate.touch()
    assert group.resize(dp=4) == epoch + 2
    first.join()
    assert held.result() == [epoch] * 2
    assert group.call("facts").result() == [(epoch + 2, 4, group.master_port, 4)] * 4


def test_tied_groups(cluster):
    """Tied workers stay together: they neither move nor change their number."""
    options = {"workers_per_node": None, "bundle_indices_list": [(0, [0, 1])]}
    with make(cluster, sharding_annotations=NamedSharding.from_shape(dp=1, tp=2), **options) as group:
        with pytest.raises(ValueError, match="tied groups do not move"):
            group.restart([0], elsewhere=True)
        with pytest.raises(ValueError, match="tied workers, which share one model copy, cannot be resized"):
            group.resize(dp=2)
        assert group.call("rank").result() == [0, 1]


def test_map_over_a_resize(group):
    """Ranks that leave finish their items and get no more."""
    results = group.map("add", range(200))
    first = [next(results) for _ in range(10)]
    group.resize(dp=1)
    everything = first + list(results)
    assert [value for _, value in everything] == list(range(200))
    assert {rank for rank, _ in everything[-20:]} == {0}


def test_values_for_another_size(group):
    """Values that were split for another size are not sent."""
    group.resize(dp=3)
    with pytest.raises(ValueError, match="2 values, but 3 workers"):
        group.call("add", PerWorker([0, 1]))


class Overlapping:
    """A worker whose async methods overlap."""

    async def epoch_after(self, seconds, *more):
        await asyncio.sleep(seconds)
        return current_worker().group_epoch


@ray.remote(num_cpus=0)
def make_slowly():
    time.sleep(1.5)
    return 1


def test_overlapping_calls_end_in_their_epoch(cluster):
    """Calls that run end before the change. One that Ray has not delivered yet runs in one epoch."""
    axes = NamedSharding.from_shape(dp=2)
    with RayWorkerGroup(
        cluster, Overlapping, workers_per_node=[2], sharding_annotations=axes, async_communication=True
    ) as group:
        calls = [group.call("epoch_after", 0.5) for _ in range(3)]
        late = group.call("epoch_after", 0.0, make_slowly.remote())
        assert group.resize(dp=3) == 1
        assert [call.result() for call in calls] == [[0, 0]] * 3
        assert [call.group_epoch for call in calls] == [0] * 3
        assert late.result() in ([0, 0], [1, 1])
        assert group.call("epoch_after", 0.0).result() == [1] * 3
        assert group.resize(dp=1) == 2
        assert group.call("epoch_after", 0.0).result() == [2]


class Described:
    """A worker with a method that is called although its name has an underscore."""

    def _variable(self, name):
        return os.environ[name]

    async def nothing(self):
        return None


def test_hidden_methods(cluster):
    """Hidden methods are called by name, by handles too, and the variables of ranks follow a resize."""
    builder = RayWorkerBuilder(Described).with_methods("_variable")
    with RayWorkerGroup(
        cluster,
        builder,
        workers_per_node=[2],
        sharding_annotations=AXES,
        async_communication="auto",
    ) as group:
        assert group.call("_variable", "LOCAL_WORLD_SIZE").result() == ["2", "2"]
        group.resize(dp=3)
        wait_until_published(group)
        assert group.handle().call("_variable", "LOCAL_WORLD_SIZE").result() == ["3"] * 3
        assert ray.get(group.workers[2]._variable.remote("RANK")) == "2"
        assert group.call("nothing").result() == [None] * 3
        view = group.at(dp=0)
        held = copy.deepcopy({"group": group, "view": view})
        assert held["group"] is group
        assert held["view"] is view
