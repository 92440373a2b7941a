# SPDX-License-Identifier: Apache-2.0
"""The timeline of a group from its own process: the trace, stragglers, and the trace that comes with an error."""

import json
import os
import pickle
import random
import threading
import time
from pathlib import Path

import pytest

from fairlead_inspect import stragglers, trace
from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import CallTimeoutError, RayWorkerGroup, Restart, WorkerFailureError, current_worker, spi
from fairlead_workergroup.testing import kill

# `nox -s nightly` repeats what has to hold each time.
RUNS = int(os.environ.get("FAIRLEAD_RUNS", "1"))
pytestmark = pytest.mark.nightly
SECRET = "secret-in-an-argument"


class Worker:
    def work(self, seconds):
        time.sleep(seconds)

    def wait_for(self, gate):
        while not os.path.exists(gate):
            time.sleep(0.01)

    def fail(self, text):
        raise ValueError(text)


class Timed:
    """A worker whose clock shows the time of its work alone, so that a busy machine does not change what it takes."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.now, self.delays = time.monotonic(), random.Random(self.rank)
        thread, read = threading.get_ident(), time.monotonic
        time.monotonic = lambda: self.read() if threading.get_ident() == thread else read()

    def read(self):
        """Return the time, which passes a little with each look, as for real workers."""
        self.now += self.delays.uniform(0, 0.0001)
        return self.now

    def work(self, seconds, slow=None, factor=1.2):
        self.now += seconds * (factor if self.rank == slow else 1.0)

    def work_alike(self, seconds):
        self.work(seconds)

    def meet(self, folder, step):
        """Wait until every worker is here, until the time at which the last one came."""
        new = Path(folder, f"{step}-{self.rank}.new")
        new.write_text(repr(self.now))
        new.rename(new.with_suffix(""))
        came = [Path(folder, f"{step}-{rank}") for rank in range(4)]
        while not all(path.exists() for path in came):
            time.sleep(0.0005)
        self.now = max(float(path.read_text()) for path in came)

    def work_and_meet(self, seconds, slow, folder, step):
        self.work(seconds, slow)
        with current_worker().waiting():
            self.meet(folder, step)

    def work_and_meet_unmarked(self, seconds, slow, folder, step):
        self.work(seconds, slow)
        self.meet(folder, step)


@pytest.fixture(scope="module")
def group(local_ray):
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Worker, name_prefix="policy", sharding_annotations=NamedSharding.from_shape(dp=2, tp=2)
        ) as made,
    ):
        yield made


def read_trace(group, tmp_path):
    trace(group, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert SECRET not in text
    return json.loads(text)


def test_trace(group, tmp_path):
    """A call of the driver contains the calls of its workers, up to the error of the clocks, and arrows join them."""
    group.call("work", 0.01).result()
    group.call("work", 0.01, collect=()).result()
    with pytest.raises(ValueError, match=SECRET):
        group.call("fail", SECRET).result()
    written = read_trace(group, tmp_path)
    events = written["traceEvents"]
    requests = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [(event["name"], event["args"]["failed"]) for event in requests] == [
        ("work", False),
        ("work", False),
        ("fail", True),
    ]
    spans = {(one["pid"], one["tid"], one["ts"]): one for one in events if one["ph"] == "X" and one["pid"] != 1}
    begins = {one["id"]: one for one in events if one["ph"] == "s"}
    ends = [one for one in events if one["ph"] == "f"]
    assert len(ends) == 12
    error = sum(written["otherData"]["clock_error_us"].values())
    for arrow in ends:
        start = begins[arrow["id"]]["ts"]
        (request,) = [one for one in requests if one["ts"] == start]
        span = spans[arrow["pid"], arrow["tid"], arrow["ts"]]
        assert span["name"] == request["name"]
        assert start - error <= span["ts"]
        if request["name"] == "work":  # the caller of one that fails does not wait for the others
            assert span["ts"] + span["dur"] <= start + request["dur"] + error
    assert sum(one["ph"] == "i" and one["name"] == "fail failed" for one in events) == 4


@pytest.mark.parametrize("run", range(RUNS))
def test_stragglers(local_ray, tmp_path, run):
    """A rank that is a fifth slower is named, with a marked barrier in the method and without, and nobody otherwise."""
    slow = run % 4
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Timed, sharding_annotations=NamedSharding.from_shape(dp=2, tp=2)) as group,
    ):
        for step in range(50):
            group.call("work", 0.01, slow).result()
            group.call("work_alike", 0.01).result()
            group.call("work_and_meet", 0.01, slow, str(tmp_path), step).result()
            group.call("work_and_meet_unmarked", 0.01, slow, str(tmp_path), f"unmarked-{step}").result()
        assert [one.rank for one in stragglers(group, "work").stragglers] == [slow]
        report = stragglers(group)
    assert {(one.method, one.rank) for one in report.stragglers} == {("work", slow), ("work_and_meet", slow)}
    assert report.ambiguous == ("work_and_meet_unmarked",)
    (timing,) = [one for one in report.timings if (one.method, one.rank) == ("work", slow)]
    assert (timing.calls, timing.slow) == (50, ("dp", "tp"))
    assert timing.ratios["dp"] == pytest.approx(1.2, abs=0.02)


def test_trace_of_a_timeout(group, tmp_path, gate, monkeypatch, wait_until_running):
    """With FAIRLEAD_TRACE_DIR set, a timeout says where its trace is, which has the call that runs."""
    traces = tmp_path / "traces"
    monkeypatch.setenv("FAIRLEAD_TRACE_DIR", str(traces))
    call = group.call("wait_for", gate, timeout=0.2)
    wait_until_running(group, "wait_for", 0, 1, 2, 3)
    with pytest.raises(CallTimeoutError) as raised:
        call.result()
    (name,) = os.listdir(traces)
    assert str(traces / name) in raised.value.__notes__[-1]
    saved = json.loads((traces / name).read_text())
    assert [one["name"] for one in saved["traceEvents"] if one.get("args", {}).get("running")] == ["wait_for"] * 4
    gate.touch()
    call.wait()


def test_trace_of_a_loss(local_ray, tmp_path, gate, monkeypatch):
    """So does the error about a lost worker, if it is raised: one that a retry hides saves no trace."""
    monkeypatch.setenv("FAIRLEAD_TRACE_DIR", str(tmp_path / "traces"))
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, restart=Restart(on_failure=True, max_restarts=2)) as group,
    ):
        call = group.call("wait_for", gate, retries=1)
        kill(group, 1)
        gate.touch()
        assert call.result() == [None, None]
        assert not (tmp_path / "traces").exists()
        never = tmp_path / "never"
        call = group.call("wait_for", never)
        kill(group, 1)
        with pytest.raises(WorkerFailureError) as raised:
            call.result()
        call = group.call("wait_for", never, retries=1)
        kill(group, 1)
        with pytest.raises(WorkerFailureError, match="max_restarts=2") as limit:
            call.result()
    traces = {name: json.loads((tmp_path / "traces" / name).read_text()) for name in os.listdir(tmp_path / "traces")}
    of_error = [
        next(saved for name, saved in traces.items() if any(name in note for note in error.__notes__))
        for error in (raised.value, limit.value)
    ]
    events = of_error[0]["traceEvents"]
    lost = [event for event in events if event["ph"] == "i" and event["name"] == "rank 1 lost: killed"]
    assert [event["pid"] for event in lost] == [1, 1]


def test_handle(group, tmp_path, gate, monkeypatch):
    """A handle gives the same trace, and its errors save one; its own calls are not in it."""
    handle = pickle.loads(pickle.dumps(group.handle()))
    group.call("work", 0.0).result()

    def find_requests(subject):
        events = read_trace(subject, tmp_path)["traceEvents"]
        return [(one["name"], one["dur"]) for one in events if one["ph"] == "X" and one.get("cat") == "request"]

    before = find_requests(handle)
    assert len(before) > 0
    monkeypatch.setenv("FAIRLEAD_TRACE_DIR", str(tmp_path / "traces"))
    call = handle.call("wait_for", gate, timeout=0.2)
    with pytest.raises(CallTimeoutError) as raised:
        call.result()
    (name,) = os.listdir(tmp_path / "traces")
    assert str(tmp_path / "traces" / name) in raised.value.__notes__[-1]
    gate.touch()
    call.wait()
    assert find_requests(group) == before
    assert [one.rank for one in stragglers(handle).timings] == [one.rank for one in stragglers(group).timings]


def test_span(group, tmp_path):
    """What a package that is built on groups does is a span in the trace, also while it runs and when it fails."""
    with spi.record_span("transfer of version 3", group, group):
        (running,) = [event for event in read_trace(group, tmp_path)["traceEvents"] if event.get("cat") == "transfer"]
    with pytest.raises(KeyError), spi.record_span("transfer of version 4", group):
        raise KeyError
    spans = [event for event in read_trace(group, tmp_path)["traceEvents"] if event.get("cat") == "transfer"]
    assert [(one["name"], one["args"]["failed"]) for one in (running, *spans)] == [
        ("transfer of version 3", False),
        ("transfer of version 3", False),
        ("transfer of version 4", True),
    ]
