# SPDX-License-Identifier: Apache-2.0
"""The page of memory that says what a worker is doing, read by other processes at any moment."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import ray

from fairlead_workergroup._host import start_tick
from fairlead_workergroup._record import (
    CANCELLED_KEPT,
    OverlappingRecord,
    Record,
    open_record,
    read_record,
    write_cancelled,
)


@pytest.fixture
def record(monkeypatch):
    """A record of this process, whose task is what the test says it is."""
    record = Record(["__init__", "work"])
    record.task = b"t" * 24
    monkeypatch.setattr(record, "_task", lambda: record.task)
    yield record
    record._page.close()
    os.close(record._file)


def read(record):
    return read_record(record._file)


def test_what_it_says(record):
    """Idle, busy with a method, its progress, idle again; times are seconds before now."""
    assert (read(record)["method"], read(record)["calls"], read(record)["step"]) == (None, 0, None)
    key = record.begin(1)
    told = read(record)
    assert (told["method"], told["calls"], told["task"]) == ("work", 1, b"t" * 24)
    assert 0 <= told["running_s"] < 60
    record.progress(step=7, message="läuft")
    told = read(record)
    assert (told["method"], told["step"], told["message"]) == ("work", 7, "läuft")
    assert told["since_progress_s"] <= told["running_s"]
    record.progress(message="x" * 1000)
    assert read(record)["message"] == "x" * 256
    record.end(key)
    assert (read(record)["method"], read(record)["running_s"], read(record)["step"]) == (None, 0.0, 7)


@pytest.mark.parametrize(("step", "error"), [(1.5, TypeError), (2**63, ValueError), (-(2**63), ValueError)])
def test_a_step_that_is_none(record, step, error):
    """It is refused, and what the worker does afterwards is recorded as before."""
    record.progress(step=np.int64(3))
    with pytest.raises(error):
        record.progress(step=step)
    record.end(record.begin(1))
    assert (read(record)["calls"], read(record)["step"]) == (1, 3)


def test_a_cancelled_call_does_not_start(record):
    """A task in the list is refused, however many are in it; others run."""
    write_cancelled(record._file, [i.to_bytes(24, "little") for i in range(CANCELLED_KEPT)])
    record.end(record.begin(1))
    write_cancelled(record._file, [b"t" * 24])
    for _ in range(2):
        with pytest.raises(ray.exceptions.TaskCancelledError):
            record.begin(1)
        assert read(record)["method"] is None
    record.task = b"u" * 24
    record.end(record.begin(1))
    write_cancelled(record._file, [b"a" + b"b" * 23, b"a" + b"c" * 23])
    record.task = b"b" * 23 + b"a"  # in the list as the end of one and the start of another
    record.end(record.begin(1))


def test_overlapping_calls(monkeypatch):
    """The one that has run longest is shown, in whatever order they end."""
    record = OverlappingRecord(["__init__", "one", "two", "three"])
    monkeypatch.setattr(record, "_task", lambda: b"t" * 24)
    keys = [record.begin(number) for number in (1, 2, 3)]
    assert read(record)["method"] == "one"
    record.end(keys[1])
    record.end(keys[0])
    assert read(record)["method"] == "three"
    record.end(keys[2])
    assert read(record)["method"] is None


@pytest.fixture
def writer():
    """A process that writes its record without a pause: one number as task, calls, step and message."""
    program = textwrap.dedent("""
        import ray
        from fairlead_workergroup._record import Record
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


def is_whole(told):
    """What one record says belongs together; whether the writer was in its method."""
    calls, step = told["calls"], told["step"]
    assert step in (calls - 1, calls) or (step is None and calls <= 1)
    assert step is None or told["message"] == "x" * (step % 200) + str(step)
    assert int.from_bytes(told["task"], "little") == (0 if told["method"] is None else calls)
    assert told["since_progress_s"] < 60
    assert told["method"] in (None, "work")
    return told["method"] is not None


def test_read_from_outside_while_it_is_written(writer):
    """Another process finds it by pid alone, and what it reads is whole; when the writer is gone, so is the record."""
    file = open_record(writer.pid)
    assert sum(is_whole(read_record(file)) for _ in range(20_000)) > 100
    os.close(file)
    writer.kill()
    writer.wait()
    assert open_record(writer.pid) is None
    assert start_tick(writer.pid) == -1
    assert open_record(os.getppid()) is None  # no worker


def test_read_while_the_writer_is_stopped(writer):
    """What it reads is whole wherever the writer was stopped: by a person, or for a while by a node with much to do."""
    file = open_record(writer.pid)
    busy = 0
    for _ in range(10_000):
        os.kill(writer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
        busy += is_whole(read_record(file))
        os.kill(writer.pid, signal.SIGCONT)
    os.close(file)
    assert busy > 100
