# SPDX-License-Identifier: Apache-2.0
"""The timeline of a group from its own process: the trace, and the trace that comes with an error."""

import json
import os
import pickle
import subprocess
import sys
import time

import pytest
import ray

from fairlead_inspect import trace
from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import CallTimeoutError, RayWorkerGroup, Restart, WorkerFailureError, spi
from fairlead_workergroup.testing import kill

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


def test_open_lane(group, tmp_path, gate, wait_until_running):
    """While a call hangs in a lane, it is in the trace and found by the commands, as without a lane."""

    def run(*arguments):
        command = [sys.executable, "-m", "fairlead_inspect", *arguments, "--group", "policy"]
        env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    with group.lane():
        call = group.call("wait_for", str(gate))
        wait_until_running(group, "wait_for", 0, 1, 2, 3)
        events = read_trace(group, tmp_path)["traceEvents"]
        running = [one["name"] for one in events if one["ph"] == "X" and one["args"].get("running")]
        assert running == ["wait_for"] * 4
        # All at once: each takes seconds, mostly for the start of Ray.
        looks = [run("status", "--json"), run("why", "--after", "0.5", "--json"), run("stacks", "--json")]
        status, why, stacks = [json.loads(one.communicate(timeout=120)[0]) for one in looks]
        assert [(one["state"], one["method"]) for one in status["workers"]] == [("busy", "wait_for")] * 4
        (found,) = why["groups"][0]["findings"]
        assert (found["kind"], found["ranks"], found["method"]) == ("stuck", [0, 1, 2, 3], "wait_for")
        assert any(one["ranks"] == [0, 1, 2, 3] and "in wait_for" in one["stacks"] for one in stacks["stacks"])
        assert not call.wait(timeout=0)
        gate.touch()
        assert call.result(timeout=60) == [None] * 4


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
