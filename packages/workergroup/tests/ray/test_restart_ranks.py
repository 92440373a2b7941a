# SPDX-License-Identifier: Apache-2.0
"""Ranks restart on request, in their slots or in others."""

import os
import pickle
import threading
import time
from pathlib import Path

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    RayWorkerBuilder,
    RayWorkerGroup,
    Restart,
    StaleGroupError,
    WorkerFailureError,
    current_worker,
)
from fairlead_workergroup.testing import kill

from ..calling import wait_until_published
from ..faults import (
    act_before_calls_are_awaited,
)

pytestmark = pytest.mark.nightly


class Worker:
    """A worker that says what it knows of itself."""

    def __init__(self, value=None):
        self.value = value

    def facts(self):
        worker = current_worker()
        return worker.rank, worker.group_epoch, worker.incarnation, os.environ["RANK"], self.value

    def load(self):
        self.value = None

    def add(self, item):
        self.value = [*(self.value or []), item]

    def wait_for(self, path):
        while not os.path.exists(path):
            time.sleep(0.02)

    def meet(self):
        """Note whether all ranks run this method at the same time, as one with a collective does."""
        folder, end = Path(os.environ["FOLDER"]), time.monotonic() + 60.0
        (folder / str(current_worker().rank)).touch()
        while len(list(folder.iterdir())) < current_worker().world_size and time.monotonic() < end:
            time.sleep(0.02)
        self.value = len(list(folder.iterdir()))


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as reserved:
        yield reserved


def lose(group, rank):
    kill(group, rank)
    with pytest.raises(WorkerFailureError):
        group.call("facts").result(timeout=60)


def test_restart_elsewhere(cluster, tmp_path, clock, monkeypatch, wait_until_running):
    """A rank restarts in a free slot, and the other workers keep their state."""
    with RayWorkerGroup(
        cluster, RayWorkerBuilder(Worker, [7]), workers_per_node=[2], restart=Restart(method="load")
    ) as group:
        names = [one["name"] for one in group.worker_metadata]
        group.call("add", 5).result()
        assert group.restart([1], elsewhere=True) == [1]
        assert group.state().group_epoch == 1
        assert group.call("facts").result() == [(0, 1, 0, "0", [7, 5]), (1, 1, 1, "1", None)]
        assert [one.restarts for one in group.get_worker_status()] == [0, 0]
        assert [one["bundle_index"] for one in group.worker_metadata] == [0, 2]
        assert [one["name"] for one in group.worker_metadata] == names
        # A handle, as another process has it, finds the actors by their names.
        wait_until_published(group)
        assert pickle.loads(pickle.dumps(group.handle())).call("facts").result() == group.call("facts").result()
        # A rank without a living worker restarts too, here in its slot.
        lose(group, 0)
        assert group.restart([0]) == [0]
        assert [one["bundle_index"] for one in group.worker_metadata] == [0, 2]
        assert group.call("facts", collect=()).result()[4] is None
        # A worker that is busy at the timeout is ended.
        held = group.at(worker=1).call("wait_for", str(tmp_path / "never"))
        wait_until_running(group, "wait_for", 1)
        act_before_calls_are_awaited(monkeypatch, lambda: clock.skip(600))
        assert group.restart([1], elsewhere=True, timeout=600) == [1]
        with pytest.raises(WorkerFailureError):
            held.result(timeout=60)
        assert [facts[:2] for facts in group.call("facts").result()] == [(0, 3), (1, 3)]


def test_restart_with_a_collective(cluster, tmp_path):
    """With scope "group" all ranks run `Restart.method` at the same time."""
    options = {"restart": Restart(scope="group", method="meet"), "env_vars": {"FOLDER": str(tmp_path)}}
    with RayWorkerGroup(cluster, Worker, workers_per_node=[2], **options) as group:
        assert group.restart([1]) == [0, 1]
        assert [facts[4] for facts in group.call("facts").result()] == [2, 2]


def test_refusals(cluster):
    """Wrong ranks and too few free slots are refused, and nothing has changed; with scope "group" all restart."""
    with RayWorkerGroup(cluster, Worker, workers_per_node=[2], restart=Restart(scope="group")) as group:
        for ranks, error, match in [
            ([], ValueError, "at least one rank"),
            ([0, 0], ValueError, "each rank once"),
            ([2], IndexError, "ranks 0 to 1"),
            ([-1], IndexError, "ranks 0 to 1"),
            ([True], TypeError, "list of ranks"),
            ("01", TypeError, "list of ranks"),
            (1, TypeError, "list of ranks"),
            (None, ValueError, "needs the ranks"),
        ]:
            with pytest.raises(error, match=match):
                group.restart(ranks, elsewhere=True)
        assert group.restart() == []
        port = group.master_port
        assert group.restart({0, 1}, elsewhere=True) == [0, 1]
        assert sorted(one["bundle_index"] for one in group.worker_metadata) == [2, 3]
        assert group.master_port != port
        with RayWorkerGroup(cluster.slots()[:1], Worker, name_prefix="other"):
            with pytest.raises(ValueError, match=r"2 rank.s. need .* there are 1 that can be used"):
                group.restart([0, 1], elsewhere=True)
            assert group.restart([1], elsewhere=True) == [0, 1]
        assert [facts[:3] for facts in group.call("facts").result()] == [(0, 2, 2), (1, 2, 2)]


def test_calls_of_a_handle(cluster):
    """A call of a handle while ranks move fails as one of another epoch: no worker is lost."""
    with RayWorkerGroup(cluster, Worker, workers_per_node=[2]) as group:
        handle, errors, is_over = group.handle(), [], threading.Event()

        def run():
            while not is_over.is_set():
                try:
                    handle.call("facts", timeout=60).result()
                except WorkerFailureError as error:
                    errors.append(error)
                except StaleGroupError:
                    continue

        caller = threading.Thread(target=run, daemon=True)
        caller.start()
        for _ in range(4):
            group.restart([0, 1], elsewhere=True)
        is_over.set()
        caller.join(90)
        assert errors == []
