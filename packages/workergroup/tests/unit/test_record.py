# SPDX-License-Identifier: Apache-2.0
"""The record of what a worker is doing, which other processes read at any moment."""

import os
import pickle
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from fairlead_workergroup._remote.process import start_tick
from fairlead_workergroup._remote.progress import (
    CANCELLED_AT,
    STATE,
    STATES_AT,
    OverlappingRecord,
    Record,
    cancel_tasks,
    look,
    open_record,
    read_record,
    read_records,
    write_cancelled,
)

# Looks at a process that writes all the time: a sample of the moments at which a look can come.
LOOKS = 100 * int(os.environ.get("FAIRLEAD_EXAMPLES", "100"))


def make_record(monkeypatch, record):
    record.task = b"t" * 24
    monkeypatch.setattr(record, "_task", lambda: record.task)
    yield record
    os.close(record._file)


@pytest.fixture
def record(monkeypatch):
    """A record of this process, whose task the test sets."""
    yield from make_record(monkeypatch, Record(["__init__", "work"]))


def read(record):
    return read_record(record._file)


def test_task_in_a_worker(monkeypatch):
    """The record asks Ray's public API for the id of the task."""
    running = ["ab" * 24, None]
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_task_id=lambda: running.pop(0)))
    record = Record(["__init__"])
    assert [record._task(), record._task()] == [b"\xab" * 24, b""]
    os.close(record._file)


def test_content(record):
    """It shows an idle worker, a busy one, its progress, and an idle one again; times are seconds before now."""
    assert (read(record)["method"], read(record)["calls"], read(record)["step"]) == (None, 0, None)
    key = record.begin(1)
    state = read(record)
    assert (state["method"], state["calls"], state["task"]) == ("work", 1, b"t" * 24)
    assert state["running_s"] >= 0
    record.progress(step=7, message="läuft")
    state = read(record)
    assert (state["method"], state["step"], state["message"]) == ("work", 7, "läuft")
    assert state["since_progress_s"] <= state["running_s"]
    record.progress(message="x" * 1000)
    assert read(record)["message"] == "x" * 256
    ending = time.monotonic()
    record.end(key)
    state = read(record)
    assert (state["method"], state["running_s"], state["step"], state["task"]) == (None, 0.0, 7, b"")
    assert state["since_progress_s"] <= time.monotonic() - ending


@pytest.mark.parametrize(("step", "error"), [(1.5, TypeError), (2**63, ValueError), (-(2**63), ValueError)])
def test_bad_step(record, step, error):
    """A bad step is refused, and later writes of the worker are recorded."""
    record.progress(step=np.int64(3))
    with pytest.raises(error):
        record.progress(step=step)
    record.end(record.begin(1))
    assert (read(record)["calls"], read(record)["step"]) == (1, 3)


def starts(record, task):
    """Return whether a task starts, and let it end."""
    record.task = task
    try:
        record.end(record.begin(1))
    except ray.exceptions.TaskCancelledError:
        return False
    return True


def test_cancelled_tasks(record):
    """A cancelled task does not start, however many are cancelled, and other tasks run."""
    tasks = [i.to_bytes(24, "little") for i in range(2000)]
    for task in tasks[::2]:
        write_cancelled(record._file, task)
    assert [starts(record, task) for task in tasks] == [False, True] * 1000
    assert read(record)["method"] is None
    key = record.begin(1)
    write_cancelled(record._file, record.task)  # it runs already
    record.end(key)
    assert record._cancelled == set()


def test_two_threads_cancel_at_once(record):
    """No task is lost if two threads add one at the same moment, while others start."""
    both_are_there = threading.Barrier(2, timeout=60)
    tasks = [i.to_bytes(24, "little") for i in range(200)]

    def cancel(own):
        for task in own:
            file = open_record(os.getpid())
            both_are_there.wait()
            write_cancelled(file, task)
            os.close(file)

    threads = [threading.Thread(target=cancel, args=[tasks[first::2]]) for first in (0, 1)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert starts(record, b"o" * 24)
    assert not any(starts(record, task) for task in tasks)


@pytest.fixture(scope="module")
def forks():
    """A process that has imported everything. For each line that it reads it forks a worker, and prints its pid."""
    program = textwrap.dedent("""
        import os, signal, sys
        from fairlead_workergroup._remote.progress import Record
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        ended, mine = os.pipe()
        for _ in sys.stdin:
            if os.fork() == 0:
                os.close(mine)
                record = Record(["__init__", "work"])
                os.write(1, f"{os.getpid()}\\n".encode())  # at once: others write too
                os.read(ended, 1)  # until the first process has ended
                os._exit(0)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def workers(forks):
    """Three idle processes, each with a record."""
    forks.stdin.write("\n" * 3)
    forks.stdin.flush()
    pids = [int(forks.stdout.readline()) for _ in range(3)]
    yield [(pid, start_tick(pid)) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_busy_record(workers):
    """Its worker is unknown, and may run a cancelled task; the other workers of its node are reported."""
    file = open_record(workers[1][0])
    for at in STATES_AT:
        os.pwrite(file, struct.pack("<Q", 10**6 + at), at + struct.calcsize(STATE) - 8)  # as if being written
    with pytest.raises(TimeoutError, match="The worker wrote its record during each of 10000 attempts"):
        read_record(file)
    os.close(file)
    assert [record and record["calls"] for record in read_records(workers)] == [0, None, 0]
    state = look(workers, 60.0, True)
    assert [("method" in row, row["gone"], row["stuck"]) for row in state] == [
        (True, False, False),
        (False, False, False),
        (True, False, False),
    ]
    assert cancel_tasks([(worker, b"t" * 24) for worker in workers]) == [False, True, False]
    for pid, _ in workers:
        file = open_record(pid)
        assert os.pread(file, 1, CANCELLED_AT) == b"\1"
        assert os.pread(file, 10_000, CANCELLED_AT).endswith(b"t" * 24)
        os.close(file)


def test_traffic(workers):
    """A look at the eight healthy workers of a node moves fewer than 100 bytes for each of them, there and back."""
    processes = (workers * 3)[:8]
    request = pickle.dumps(["f" * 32, None, processes, 300.0, False], 5)
    answer = pickle.dumps((look(processes, 300.0, False),), 5)
    assert len(request) + len(answer) < 100 * len(processes)


@pytest.fixture
def overlapping(monkeypatch):
    """The record of a worker whose methods overlap."""
    yield from make_record(monkeypatch, OverlappingRecord(["__init__", "one", "two", "three"]))


def test_overlapping_calls(overlapping):
    """The record shows the method that has run longest, in whatever order they end."""
    record = overlapping
    keys = [record.begin(number) for number in (1, 2, 3)]
    assert read(record)["method"] == "one"
    record.end(keys[1])
    record.end(keys[0])
    assert read(record)["method"] == "three"
    record.end(keys[2])
    assert read(record)["method"] is None


def test_overlapping_calls_of_two_threads(overlapping):
    """Methods on the event loop and generators in threads begin and end at the same time; none of them fails."""
    errors = []

    def work():
        try:
            for _ in range(3_000):
                keys = [overlapping.begin(number) for number in (1, 2, 3)]
                for key in keys:
                    overlapping.end(key)
        except Exception as error:  # noqa: BLE001  the test shows it
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert read(overlapping)["method"] is None


@pytest.fixture
def writer():
    """A process that writes its record all the time, with the same number as task, calls, step and message."""
    program = textwrap.dedent("""
        import ray
        from fairlead_workergroup._remote.progress import Record
        record = Record(["__init__", "work"])
        task = b""
        record._task = lambda: task
        print("Ray runs:", ray.is_initialized(), flush=True)
        i = 0
        while True:
            i += 1
            task = i.to_bytes(24, "little")
            key = record.begin(1)
            record.progress(step=i, message="x" * (i % 200) + str(i))
            record.end(key)
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"Ray runs: False\n"
    yield process
    process.kill()
    process.communicate()


def check_state(state):
    """Check that a state is complete; return whether the writer was in its method."""
    calls, step = state["calls"], state["step"]
    assert step in (calls - 1, calls) or (step is None and calls <= 1)
    assert step is None or state["message"] == "x" * (step % 200) + str(step)
    assert int.from_bytes(state["task"], "little") == (0 if state["method"] is None else calls)
    assert state["since_progress_s"] < 60
    assert state["method"] in (None, "work")
    return state["method"] is not None


def test_read_during_writes(writer):
    """Another process finds the record by pid and reads complete states; the record ends with the writer."""
    file = open_record(writer.pid)
    assert sum(check_state(read_record(file)) for _ in range(2 * LOOKS)) > 100
    os.close(file)
    writer.kill()
    writer.wait()
    assert open_record(writer.pid) is None
    assert start_tick(writer.pid) == -1
    assert open_record(os.getppid()) is None  # no worker


def test_read_during_a_stop(writer):
    """A reader gets complete states wherever the writer was stopped."""
    file = open_record(writer.pid)
    busy = 0
    for _ in range(LOOKS):
        os.kill(writer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
        busy += check_state(read_record(file))
        os.kill(writer.pid, signal.SIGCONT)
    os.close(file)
    assert busy > 100
