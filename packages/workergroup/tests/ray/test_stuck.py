# SPDX-License-Identifier: Apache-2.0
"""Stuck workers: where they are in their code, and which rank does not wait where the others wait."""

import ctypes
import os
import signal
import threading
import time

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, report_progress

from ..hanging import hanging, stopped

SIGNAL = signal.SIGRTMIN + 5


class Worker:
    def rank(self):
        return int(os.environ["RANK"])

    def read(self, fifo):
        """Wait in a system call until another process writes."""
        with open(fifo) as file:
            return file.read()

    def sleep_natively(self, gate):
        """Sleep until a file exists; return how often a signal has interrupted it. Report progress meanwhile."""
        awake = threading.Event()

        def report():
            while not awake.wait(0.02):
                report_progress(step=1)

        thread = threading.Thread(target=report)
        thread.start()
        interrupted, sleep = 0, ctypes.CDLL(None).usleep
        try:
            while not os.path.exists(gate):
                interrupted -= sleep(500_000)
            return interrupted
        finally:
            awake.set()
            thread.join()

    def steps(self, gate):
        while not os.path.exists(gate):
            report_progress(step=1)
            time.sleep(0.02)


@pytest.fixture(scope="module")
def group(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as workers:
        yield workers


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def release(fifo, readers):
    """Write to the pipe, so that each reader returns, and return their results."""
    fd = os.open(fifo, os.O_WRONLY)
    os.write(fd, b"done")
    os.close(fd)
    return ray.get(readers, timeout=60)


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["sleep", "native", "native-gil"])
def test_hang(group, how):
    """A hanging worker is found with the stacks of its threads and the calling frame, and stays in its call."""
    with hanging(group, 2, how) as call:
        time.sleep(0.3)
        (found,) = group.detect_stuck_workers(0.2)
        assert (found.rank, found.coords, found.method) == (2, {"worker": 2}, "<function>")
        assert (found.pid, found.node_id) == (group.get_worker_status()[2].pid, group.worker_metadata[2]["node_id"])
        assert 0.2 <= found.since_progress_s == pytest.approx(found.running_s, abs=0.1)
        assert found.where.endswith(" in hang")
        assert "in _fairlead_apply" in found.stacks
        assert "Thread 0x" in found.stacks
        assert not call.done()
        (again,) = group.detect_stuck_workers(0.2)  # with nothing left over from before
        assert again.stacks.count("in hang\n") == 1
        (plain,) = group.detect_stuck_workers(0.2, dump_stacks=False)
        assert (plain.stacks, plain.where) == ("", "")
    assert group.detect_stuck_workers(0.2) == []
    assert group.call("rank", timeout=60).result() == [0, 1, 2, 3]


def test_stopped(group):
    """A stopped process is found, also if it was idle; it gets no signal, because it cannot write its stacks."""
    with stopped(group, 1):
        time.sleep(0.3)
        found = {one.rank: one for one in group.detect_stuck_workers(0.2)}
        assert list(found) == [1]
        assert (found[1].method, found[1].stacks) == (None, "")
        assert found[1].note.startswith("the process has been stopped (SIGSTOP)")
        with open(f"/proc/{found[1].pid}/status") as file:
            assert int(next(line for line in file if line.startswith("ShdPnd")).split()[1], 16) & 1 << SIGNAL - 1 == 0
    assert group.call("rank", timeout=60).result() == [0, 1, 2, 3]


def test_no_signal_to_other_workers(group, gate, eventually, wait_until_running):
    """A worker that is not stuck continues its sleep while another one writes its stacks."""
    with hanging(group, 2):
        sleeper = group.workers[1].sleep_natively.remote(str(gate))
        wait_until_running(group, "sleep_natively", 1)
        assert eventually(lambda: [one.rank for one in group.detect_stuck_workers(1)] == [2], 60)
        assert group.get_worker_status()[1].method == "sleep_natively"  # it was asleep meanwhile
        gate.touch()
        assert ray.get(sleeper, timeout=60) == 0


def test_progress(group, gate, eventually):
    """A long method that reports progress is not stuck."""
    call = group.call("steps", gate)
    assert eventually(lambda: all(one.running_s > 1.0 for one in group.get_worker_status()), 60)
    assert group.detect_stuck_workers(1.0) == []
    gate.touch()
    call.result()


def test_odd_rank(group, fifo, eventually):
    """If the others wait in one call, notes on both sides name the rank that does not."""
    readers = [group.workers[rank].read.remote(str(fifo)) for rank in (0, 1, 3)]
    with hanging(group, 2, "native"):
        assert eventually(lambda: len(group.detect_stuck_workers(0.3, dump_stacks=False)) == 4, 60)
        found = group.detect_stuck_workers(0.3)
        assert [one.rank for one in found] == [0, 1, 2, 3]
        assert "3 others wait at " in found[2].note
        assert found[2].note.endswith(f"{found[0].where}, this rank does not")
        assert found[0].where.endswith(" in read")
        assert "test_stuck.py:" in found[0].where
        assert found[0].note == f"2 others wait at the same place; not there: rank 2 at {found[2].where}"
    release(fifo, readers)
    readers = [group.workers[rank].read.remote(str(fifo)) for rank in (0, 1, 3)]
    assert eventually(lambda: len(group.detect_stuck_workers(0.3, dump_stacks=False)) == 3, 60)
    assert {one.note for one in group.detect_stuck_workers(0.3)} == {
        "2 others wait at the same place; not there: rank 2 idle"
    }
    release(fifo, readers)
