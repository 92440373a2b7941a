# SPDX-License-Identifier: Apache-2.0
"""The record of what a worker is doing, which other processes read at any moment."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import ray

from fairlead_workergroup._remote.process import start_tick
from fairlead_workergroup._remote.record import (
    Record,
    open_record,
    read_record,
    write_cancelled,
)

# Looks at a process that writes all the time: a sample of the moments at which a look can come.
LOOKS = 100 * int(os.environ.get("FAIRLEAD_EXAMPLES", "100"))


@pytest.fixture
def record(monkeypatch):
    """A record of this process, whose task the test sets."""
    record = Record(["__init__", "work", "two", "three"])
    record.task = b"t" * 24
    monkeypatch.setattr(record, "_task", lambda: record.task)
    yield record
    os.close(record._file)


def read(record):
    return read_record(record._file)


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


def test_overlapping_calls(record):
    """The record shows the method that has run longest, in whatever order they end."""
    keys = [record.begin(number) for number in (1, 2, 3)]
    assert read(record)["method"] == "work"
    record.end(keys[1])
    record.end(keys[0])
    assert read(record)["method"] == "three"
    record.end(keys[2])
    assert read(record)["method"] is None


def test_overlapping_calls_of_two_threads(record):
    """Methods on the event loop and generators in threads begin and end at the same time; none of them fails."""
    errors = []

    def work():
        try:
            for _ in range(3_000):
                keys = [record.begin(number) for number in (1, 2, 3)]
                for key in keys:
                    record.end(key)
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
    assert read(record)["method"] is None


@pytest.fixture
def writer():
    """A process that writes its record all the time, with the same number as task, calls, step and message."""
    program = textwrap.dedent("""
        import ray
        from fairlead_workergroup._remote.record import Record
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
