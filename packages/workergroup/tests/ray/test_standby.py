# SPDX-License-Identifier: Apache-2.0
"""Standbys take over the ranks of lost workers, and ranks move to other processes on request."""

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from rich.console import Console

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    Elastic,
    RayWorkerBuilder,
    RayWorkerGroup,
    Restart,
    Timeouts,
    WorkerFailureError,
    WorkerStartError,
    current_worker,
    spi,
)
from fairlead_workergroup.testing import kill

from ..faults import (
    act_before_calls_are_awaited,
    hold_standbys_back,
    interrupt_starts,
    note_release,
    report_late_workers_every,
)

pytestmark = pytest.mark.nightly

IMPORTED_WITH_RANK = os.environ.get("RANK")


class Worker:
    """A worker that says where it was imported."""

    def __init__(self, value=None):
        self.value = value

    def facts(self):
        worker = current_worker()
        return worker.rank, worker.epoch, worker.incarnation, os.environ["RANK"], self.value

    def pid(self):
        return os.getpid(), IMPORTED_WITH_RANK

    def save(self):
        if os.path.exists(os.environ.get("FAIL_TO_SAVE", "")):
            raise OSError("disk full")
        return {"value": self.value, "from": os.getpid()}

    def load(self, saved=None):
        self.value = saved

    def add(self, item):
        self.value = [*(self.value or []), item]

    def wait_for(self, path):
        while not os.path.exists(path):
            time.sleep(0.02)

    def wait_for_gate(self):
        Path(f"{os.environ['GATE']}.begun").touch()
        self.wait_for(os.environ["GATE"])

    def save_late(self):
        self.wait_for_gate()
        return "saved late"

    def load_late(self, saved=None):
        self.wait_for_gate()
        self.value = "loaded late"

    def meet(self, saved=None):
        """Note whether all ranks run this method at the same time, as one with a collective does."""
        folder, end = Path(os.environ["FOLDER"]), time.monotonic() + 60.0
        (folder / str(current_worker().rank)).touch()
        while len(list(folder.iterdir())) < current_worker().world_size and time.monotonic() < end:
            time.sleep(0.02)
        self.value = len(list(folder.iterdir()))


class Different:
    """A class whose ranks need different variables before they start."""

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return {}, {"PYTHONHASHSEED": str(bundle_indices[1][0])}, {}


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as reserved:
        yield reserved


def lose(group, rank):
    kill(group, rank)
    with pytest.raises(WorkerFailureError):
        group.call("facts").result(timeout=60)


def test_take_over(cluster, eventually):
    """A lost rank takes the standby with its process and its slot; another one starts in the slot that is free now."""
    events = []
    builder = RayWorkerBuilder(Worker, [7])
    with (
        RayWorkerGroup(cluster, builder, workers_per_node=[2], elastic=Elastic(standby=1)) as group,
    ):
        spi.subscribe(group, events.append, lambda within_s: None)
        assert eventually(lambda: group.inspect().standby == 1, 60)
        assert [one["bundle_index"] for one in group.inspect().standby_metadata] == [2]
        console = Console(width=120)
        with console.capture() as shown:
            console.print(cluster.grid([group]))
        assert "standby" in shown.get()
        names = [one["name"] for one in group.worker_metadata]
        lose(group, 1)
        assert group.restart_failed_workers() == [1]
        assert group.inspect().epoch == 1
        assert group.call("facts").result() == [(0, 1, 0, "0", [7]), (1, 1, 1, "1", [7])]
        assert group.call("pid").result()[1][1] is None
        assert [one["bundle_index"] for one in group.worker_metadata] == [0, 2]
        assert [one["name"] for one in group.worker_metadata] == names
        # A handle, as another process has it, finds the actors by their names.
        assert pickle.loads(pickle.dumps(group.handle())).call("facts").result() == group.call("facts").result()
        assert eventually(lambda: group.inspect().standby == 1, 60)
        assert [one["bundle_index"] for one in group.inspect().standby_metadata] == [1]
        # A standby that dies is started again.
        ready = [event for event in events if event.kind == "standby-ready"]
        assert eventually(lambda: sum(event.kind == "standby-ready" for event in events) >= 2, 60), ready
        for rank in (0, 1):
            lose(group, rank)
            assert group.restart_failed_workers() == [rank]
            assert eventually(lambda: group.inspect().standby == 1, 60)
        assert group.call("pid").result()[0][1] is None
        assert sorted(one["bundle_index"] for one in (*group.worker_metadata, *group.inspect().standby_metadata)) == [
            0,
            1,
            2,
        ]
        # The names of standbys that have ended are forgotten.
        assert len(group._resources.registration._names) == 2
        assert group.resize(worker=3) == 4
        assert group.worker_metadata[2]["bundle_index"] == 3
        assert group.shutdown()
        assert group.inspect().standby_metadata == []
        assert group.inspect().standby == 0


def test_standbys_are_refused(cluster):
    """Nothing is launched if there is no room for standbys, or if ranks could not take each other's place."""
    for options, match in [
        ({}, "needs slots that the group does not use, and there are 0"),
        ({"bundle_indices_list": [(0, [0, 1])]}, "tied groups cannot"),
    ]:
        with pytest.raises(ValueError, match=match):
            RayWorkerGroup(cluster, Worker, elastic=Elastic(standby=1), **options)
    with pytest.raises(ValueError, match="rank 1 has other options"):
        RayWorkerGroup(cluster, Different, workers_per_node=[2], elastic=Elastic(standby=1))
    with RayWorkerGroup(cluster, Worker, [1]) as group:
        assert group.inspect().standby == 0


def test_group_scope(cluster, eventually):
    """With scope "group" everybody restarts, and the lost rank in the standby's process."""
    with RayWorkerGroup(
        cluster, Worker, workers_per_node=[2], elastic=Elastic(standby=1), restart=Restart(scope="group")
    ) as group:
        assert eventually(lambda: group.inspect().standby == 1, 60)
        lose(group, 0)
        assert group.restart_failed_workers() == [0, 1]
        assert [imported for _, imported in group.call("pid").result()] == [None, "1"]
        assert eventually(lambda: group.inspect().standby == 1, 60)


def test_replace_with_a_standby(cluster, eventually, tmp_path, clock, monkeypatch, wait_until_running):
    """The old worker hands its state over, the others keep theirs, and the vacated slot gets the next standby."""
    events = []
    options = {
        "elastic": Elastic(standby=1, on_handover="save"),
        "restart": Restart(method="load"),
        "env_vars": {"FAIL_TO_SAVE": str(tmp_path / "full")},
    }
    with (
        RayWorkerGroup(cluster, RayWorkerBuilder(Worker, []), workers_per_node=[2], **options) as group,
    ):
        spi.subscribe(group, events.append, lambda within_s: None)
        assert eventually(lambda: group.inspect().standby == 1, 60)
        group.call("add", 5).result()
        before = [pid for pid, _ in group.call("pid").result()]
        (tmp_path / "full").touch()
        with pytest.raises(OSError, match="disk full"):
            group.replace([1])
        (tmp_path / "full").unlink()
        assert (group.inspect().epoch, group.inspect().standby) == (0, 1)
        assert [pid for pid, _ in group.call("pid").result()] == before

        assert group.replace([1]) == group.inspect().epoch == 1
        saved = {"value": [5], "from": before[1]}
        assert group.call("facts").result() == [(0, 1, 0, "0", [5]), (1, 1, 1, "1", saved)]
        assert [one.restarts for one in group.get_worker_status()] == [0, 0]
        assert [one["bundle_index"] for one in group.worker_metadata] == [0, 2]
        assert eventually(lambda: group.inspect().standby == 1, 60)
        assert [one["bundle_index"] for one in group.inspect().standby_metadata] == [1]
        assert eventually(lambda: any(event.kind == "replaced" and event.rank == 1 for event in events), 60)
        # A rank without a living worker is replaced too; nothing is handed over.
        lose(group, 0)
        assert group.replace([0]) == 2
        assert group.call("facts", collect=()).result()[4] is None
        # A worker that is busy at the timeout is ended.
        assert eventually(lambda: group.inspect().standby == 1, 60)
        held = group.at(worker=1).call("wait_for", str(tmp_path / "never"))
        wait_until_running(group, "wait_for", 1)
        act_before_calls_are_awaited(monkeypatch, lambda: clock.skip(600))
        assert group.replace([1], timeout=600) == 3
        with pytest.raises(WorkerFailureError):
            held.result(timeout=60)
        assert [facts[:2] for facts in group.call("facts").result()] == [(0, 3), (1, 3)]


def test_interrupted_takeover(cluster, eventually, monkeypatch):
    """If Ctrl-C ends a restart, the standby that was to take over a rank is ended, and does not occupy its slot."""
    with RayWorkerGroup(
        cluster, Worker, workers_per_node=[1], elastic=Elastic(standby=1), timeouts=Timeouts(start_s=60)
    ) as group:
        assert eventually(lambda: group.inspect().standby == 1)
        before = {number for number in group._resources._workers if number < 0}
        lose(group, 0)
        with monkeypatch.context() as patched:
            interrupt_starts(patched)
            with pytest.raises(KeyboardInterrupt):
                group.restart_failed_workers()
        assert not before & group._resources._workers.keys()
        assert group.restart_failed_workers() == [0]
        assert eventually(lambda: group.inspect().standby == 1)
        bundles = [one["bundle_index"] for one in (*group.worker_metadata, *group.inspect().standby_metadata)]
        assert (group.call("facts", collect=()).result()[0], sorted(bundles)) == (0, [0, 1])


def test_shutdown_while_a_standby_starts(cluster, monkeypatch):
    """A shutdown returns when the thread that starts a standby has ended."""
    creating, may_create = hold_standbys_back(monkeypatch)
    given_back = note_release(monkeypatch)
    with (
        ThreadPoolExecutor() as pool,
        RayWorkerGroup(cluster, Worker, workers_per_node=[1], elastic=Elastic(standby=1)) as group,
    ):
        assert creating.wait(60)
        ended = pool.submit(group.shutdown)
        assert given_back.wait(60)
        assert wait([ended], timeout=0.5).not_done
        may_create.set()
        assert ended.result(timeout=60)


def test_replace_with_a_collective(cluster, tmp_path):
    """With scope "group" all ranks run `Restart.method` at the same time, those that get a handed-over value too."""
    options = {
        "elastic": Elastic(on_handover="save"),
        "restart": Restart(scope="group", method="meet"),
        "env_vars": {"FOLDER": str(tmp_path)},
    }
    with RayWorkerGroup(cluster, Worker, workers_per_node=[2], **options) as group:
        group.replace([1])
        assert [facts[4] for facts in group.call("facts").result()] == [2, 2]


def test_resize_after_a_loss_with_group_scope(cluster):
    """A resize restarts the ranks that `restart_failed_workers` would restart: with scope "group" all of them."""
    builder = RayWorkerBuilder(Worker, "new")
    with RayWorkerGroup(cluster, builder, workers_per_node=[2], restart=Restart(scope="group", method="load")) as group:
        lose(group, 1)
        group.resize(worker=3)
        states = [(incarnation, value) for _, _, incarnation, _, value in group.call("facts").result()]
        assert states == [(1, None), (1, None), (0, "new")]


@pytest.mark.parametrize(("save", "load"), [("save_late", "load"), ("save", "load_late")])
def test_timeout_of_a_replacement(cluster, gate, clock, monkeypatch, eventually, save, load):
    """A method of the user that takes longer than the timeout of a replacement is not waited for."""
    report_late_workers_every(monkeypatch, 0.1)
    options = {"elastic": Elastic(on_handover=save), "restart": Restart(method=load)}
    options |= {"timeouts": Timeouts(start_s=3600), "env_vars": {"GATE": str(gate)}}
    with ThreadPoolExecutor() as threads, RayWorkerGroup(cluster, Worker, workers_per_node=[1], **options) as group:
        replaced = threads.submit(group.replace, [0], 600)
        assert eventually(Path(f"{gate}.begun").exists)
        clock.skip(600)
        error = replaced.exception(timeout=60)
        gate.touch()
        assert error or group.call("facts").result()[0][4] is None


class Handed:
    """A value that one process must not unpickle."""

    def __init__(self, not_in):
        self.not_in = not_in

    def __reduce__(self):
        return make_handed, (self.not_in,)


def make_handed(not_in):
    assert os.getpid() != not_in, "the driver has fetched the value"
    return Handed(not_in)


@pytest.mark.parametrize("kind", ["plain", "overlapping"])
def test_handover_does_not_pass_through_the_driver(cluster, kind):
    """The value goes from the old worker to the new one."""
    driver = os.getpid()

    class Keeper:
        def __init__(self):
            self.got = None

        def save(self):
            return Handed(driver)

        def load(self, saved=None):
            self.got = saved

        def what(self):
            return type(self.got).__name__

    class AsyncKeeper(Keeper):
        async def save(self):
            return Handed(driver)

    worker = AsyncKeeper if kind == "overlapping" else Keeper
    options = {
        "elastic": Elastic(on_handover="save"),
        "restart": Restart(method="load"),
        "async_communication": kind == "overlapping",
    }
    with RayWorkerGroup(cluster, worker, workers_per_node=[1], **options) as group:
        assert group.replace([0]) == 1
        assert group.call("what").result() == ["Handed"]


def test_replace_in_a_free_slot(cluster):
    """Without a standby the ranks move to new processes in slots that nobody uses; with scope "group" all restart."""
    with RayWorkerGroup(cluster, Worker, workers_per_node=[2], restart=Restart(scope="group")) as group:
        for ranks, error, match in [
            ([], ValueError, "at least one rank"),
            ([0, 0], ValueError, "each rank once"),
            ([2], IndexError, "ranks 0 to 1"),
            ([-1], IndexError, "ranks 0 to 1"),
            ([True], TypeError, "list of ranks"),
            ("01", TypeError, "list of ranks"),
            (1, TypeError, "list of ranks"),
            (None, TypeError, "list of ranks"),
        ]:
            with pytest.raises(error, match=match):
                group.replace(ranks)
        with pytest.raises(WorkerStartError, match="had not imported the class's module at the deadline"):
            group.replace([0], timeout=0)
        port = group.master_port
        assert group.replace({0, 1}) == 1
        assert sorted(one["bundle_index"] for one in group.worker_metadata) == [2, 3]
        assert group.master_port != port
        with RayWorkerGroup(cluster.slots()[:1], Worker, name_prefix="other"):
            with pytest.raises(ValueError, match=r"2 rank.s. need .* there are 1 that can be used"):
                group.replace([0, 1])
            assert group.replace([1]) == 2
        assert [facts[:3] for facts in group.call("facts").result()] == [(0, 2, 2), (1, 2, 2)]
        assert group.inspect().standby == 0
    with pytest.raises(ValueError, match="on_handover needs Restart"):
        RayWorkerGroup(cluster, Worker, elastic=Elastic(on_handover="save"))
    with pytest.raises(ValueError, match="on_drain must be"):
        RayWorkerGroup(cluster, Worker, elastic=Elastic(on_drain="move"))
