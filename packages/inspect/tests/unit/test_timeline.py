# SPDX-License-Identifier: Apache-2.0
"""The ring of finished calls, and the trace, without Ray."""

import itertools
import json
import math
import os
import random
import struct

import pytest

from fairlead_inspect._remote import ring
from fairlead_inspect._remote.outside import read_timelines
from fairlead_inspect._timeline import Request, Span, Timeline, WorkerTimeline
from fairlead_inspect._trace import TraceSaver, make_trace, write_trace
from fairlead_sharding import NamedSharding
from fairlead_workergroup import WorkerGroupError
from fairlead_workergroup.spi import RegisteredGroup, RegisteredWorker, start_tick

ME = (os.getpid(), start_tick(os.getpid()))


@pytest.fixture
def rings(monkeypatch):
    """Rings of this process, with names of their own: the functions that add a call and a step."""
    for name in ("CALLS_FILE", "STEPS_FILE"):
        monkeypatch.setattr(ring, name, f"{getattr(ring, name)}-{random.random()}")
    on_call, on_step = [], []
    ring.start_rings(on_call, on_step)
    return on_call[0], on_step[0]


def finish(add, number, method=1, failed=False):
    add(number, method, 1.0, 2.0, 0.0, failed, b"t" * 24, number)


def calls():
    read = ring.read_ring(os.getpid(), ring.CALLS_FILE, ring.CALL)
    assert all(weights == number for number, *_, weights in read)
    return [(number, method, failed) for number, method, _, _, _, failed, *_ in read]


def test_ring(rings):
    """The latest 512 calls are kept, in order, with their outcome, and the latest steps."""
    add_call, add_step = rings
    for number in range(1, 601):
        finish(add_call, number, 1 + (number - 1) % 2, number == 600)
        add_step(number / 2, number)
    assert calls() == [(number, 1 + (number - 1) % 2, number == 600) for number in range(89, 601)]
    steps = ring.read_ring(os.getpid(), ring.STEPS_FILE, ring.STEP)
    assert steps == [(number / 2, number) for number in range(89, 601)]


def test_torn_entry(rings):
    """An entry that is being written is left out."""
    for number in (1, 2, 3):
        finish(rings[0], number)
    file = next(fd for fd in os.listdir("/proc/self/fd") if ring.CALLS_FILE in os.readlink(f"/proc/self/fd/{fd}"))
    size = struct.calcsize(ring.CALL)
    os.pwrite(int(file), struct.pack("<Q", 514), 2 * size)  # the first half of what takes the place of the second
    assert [number for number, *_ in calls()] == [1, 3]


def test_other_processes():
    """A process without a record, or that has ended, has no timeline."""
    assert read_timelines([(1, start_tick(1)), (ME[0], ME[1] + 1)]) == [None, None]


MESH = NamedSharding.from_shape(dp=4, tp=2)


def group(mesh=MESH):
    members = tuple(
        RegisteredWorker(
            rank, f"w-{rank}", mesh.get_worker_coords(rank), f"node{rank % 2}" * 8, f"10.0.0.{rank % 2}", 10 + rank, 1,
            1 if rank == 3 else 0, 0, "", ""
        )
        for rank in range(mesh.size)
    )  # fmt: skip
    driver = {"pid": 7, "host": "head", "node_id": "n", "job_id": "01", "worker_id": "w", "started": 1}
    return RegisteredGroup("ab" * 16, "policy", "Trainer", mesh.shape, mesh.to_dict(), 0.0, "ns", 1, driver, members)


def timeline(spans, requests=(), steps=((5.5, 3),)):
    found = group()
    workers = tuple(WorkerTimeline(one, tuple(spans(one.rank)), tuple(steps), 0.001) for one in found.members)
    return Timeline(found, workers, tuple(requests), 100.0, 0.0005)


def task(rank, number):
    return struct.pack("<II", rank, number)


def two_calls(rank):
    yield Span(1, "train", 5.0 + rank / 1000, 6.0, 0.25, False, task(rank, 1))
    yield Span(2, "save", 7.0, 7.5, 0.0, rank == 2, task(rank, 2))
    yield Span(3, "train", 8.0, None)


REQUESTS = (
    Request("train", 4.9, 6.1, False, 8, tuple(task(rank, 1) for rank in range(8))),
    Request("save", 5.5, None, False, 8, tuple(task(rank, 2) for rank in range(8))),
)


def check_trace(trace):
    """Check what viewers require of the trace event format; each track's spans are nested or apart."""
    json.dumps(trace, allow_nan=False)
    known = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}}
    tracks = {}
    for event in trace["traceEvents"]:
        assert known[event["ph"]] <= set(event)
        assert {"name", "pid", "tid"} <= set(event)
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 0.01
    starts = [event["id"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert sorted(starts) == sorted(event["id"] for event in trace["traceEvents"] if event["ph"] == "f")
    assert len(set(starts)) == len(starts)


def test_trace():
    """The trace has the workers by node, the driver's calls with an arrow to each worker, and what happened."""
    trace = make_trace(timeline(two_calls, REQUESTS))
    check_trace(trace)
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[2, 1] == "rank 0 (dp=0, tp=0)"
    assert names[3, 2] == "rank 1 (dp=0, tp=1)"
    assert (names[1, 1], names[1, 2]) == ("calls 1", "calls 2")
    assert [event["name"] for event in events if event["ph"] == "i"] == ["save failed", "restart 1"]
    assert sum(event["ph"] == "s" for event in events) == 16
    assert sum(event["ph"] == "C" for event in events) == 8
    (running, *_) = [event for event in events if event.get("args", {}).get("running")]
    assert running["dur"] == pytest.approx((100.0 - 8.0) * 1e6)
    (save,) = [event for event in events if event["ph"] == "X" and event["pid"] == 1 and event["name"] == "save"]
    assert save["dur"] == pytest.approx(2e6)  # until its last worker has ended
    assert trace["otherData"]["mesh"] == {"dp": 4, "tp": 2}


def test_running_calls():
    """A call in the log is identified by its tasks, even if it is repeated. Other calls are compared by their start."""
    numbers = {0: 2, 1: 1, 2: 2, 3: 1, 4: 7}

    def spans(rank):
        if rank < 5:
            yield Span(numbers[rank], "train", 9.0 + rank, None, task=task(rank, 1))

    requests = (
        Request("train", 5.0, None, False, 8, (task(0, 1), task(1, 1))),
        Request("train", 5.0, None, False, 1, (task(2, 1),)),  # repeated on the rank that was lost
        Request("train", 6.0, None, False, 2, (task(3, 1),)),
    )
    assert timeline(spans, requests).find_calls() == {
        (0, 0, 2): (5.0, 5.0),
        (1, 0, 1): (5.0, 5.0),
        (2, 0, 2): (5.0, 5.0),
        (3, 1, 1): (-math.inf, 6.0),
        (4, 0, 7): (-math.inf, pytest.approx(13.0015)),
    }


def test_nothing_yet():
    """A group that has done nothing has a trace with its tracks."""
    check_trace(make_trace(timeline(lambda rank: (), steps=())))


def test_file(tmp_path):
    """The file is complete or not there, and can be read by others."""
    path = tmp_path / "trace.json"
    write_trace(timeline(two_calls, REQUESTS), path)
    check_trace(json.loads(path.read_text()))
    with pytest.raises(OSError, match="No such file"):
        write_trace(timeline(two_calls), tmp_path / "missing" / "trace.json")
    assert os.listdir(tmp_path) == ["trace.json"]


def test_saved_with_an_error(tmp_path, monkeypatch):
    """With FAIRLEAD_TRACE_DIR an error says where the trace is; errors at one time share it."""
    saver = TraceSaver(lambda: timeline(two_calls))
    saver.explain(error := ValueError())
    assert not hasattr(error, "__notes__")
    monkeypatch.setenv("FAIRLEAD_TRACE_DIR", str(tmp_path / "traces"))
    for _ in range(2):
        saver.explain(error := ValueError())
        (name,) = os.listdir(tmp_path / "traces")
        assert error.__notes__ == [
            f"The trace of the last minutes is {tmp_path}/traces/{name}; open it in https://ui.perfetto.dev."
        ]
    assert name.startswith("policy-ababab-")

    def fail():
        raise WorkerGroupError("No agent.")

    TraceSaver(fail).explain(error := ValueError())
    assert error.__notes__ == [f"The trace could not be saved in {tmp_path}/traces: No agent."]
