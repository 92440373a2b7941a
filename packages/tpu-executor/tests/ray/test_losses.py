# SPDX-License-Identifier: Apache-2.0
"""Runs lose hosts, slices stay incomplete, and other processes are not harmed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from fairlead_tpu_executor import (
    InsufficientSlicesError,
    JobPreempted,
    PreemptionLimitError,
    RayExecutor,
    SliceLostError,
    SlicePool,
    TpuAcceleratorConfig,
    TpuRemoteManager,
)
from fairlead_tpu_executor._health import Head
from fairlead_tpu_executor._reserve import leases, reservation, scaling
from fairlead_tpu_executor._run import attempt

KIND = "v5p-16"


class Run(threading.Thread):
    """A call on its own thread."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.call = function, args, kwargs
        self.value = self.error = None
        self.start()

    def run(self):
        function, args, kwargs = self.call
        try:
            self.value = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it is raised by `answer`
            self.error = error

    def answer(self, timeout_s=150):
        self.join(timeout_s)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.value


def until_killed(record, name):
    """Run for ten minutes in the slice that the test kills, and return at once in any other."""
    record.write()
    if os.environ["TPU_SLICE_NAME"] == name:
        time.sleep(600)
    return os.environ["TPU_SLICE_NAME"]


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def is_zombie(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return gone(pid)


def test_a_host_dies(slices, spare, record, eventually):
    """A dead host is a preemption: other calls are cancelled, new capacity replaces the slice, and the run succeeds.

    The replacement comes after the scale timeout, which is for the first slices only.
    """
    lost = spare()

    def work():
        return until_killed(record, lost)

    options = {"max_retries_failure": 0, "max_retries_preemption": 1, "scale_timeout_s": 0.5}
    with SlicePool(KIND, **options) as pool:
        run = Run(pool.run, work)
        assert eventually(lambda: len(record.counts()) == 2, 120)
        slices.kill(lost, 1)
        new = spare()
        assert run.answer() == [new, new]
        assert [one.slice_name for one in pool.slices] == [new]
        assert (pool.statistics().preemptions, pool.statistics().attempts) == (1, 2)
        assert record.counts() == {f"{lost}.0": 1, f"{lost}.1": 1, f"{new}.0": 1, f"{new}.1": 1}
        pids = [line.split()[0] for worker in (0, 1) for line in record.of(f"{lost}.{worker}")]
        assert eventually(lambda: all(map(gone, pids)))


@pytest.mark.nightly
def test_a_process_dies_before_its_host(slices, spare, record, eventually):
    """A host whose processes end seconds before the host is gone is preempted, and uses no budget of failures.

    The pool sees that the host is silent before Ray says that it is dead, and does not run there again.
    """
    lost = spare()

    def work():
        record.meet()  # both hosts have begun before a process dies
        if os.environ["TPU_SLICE_NAME"] != lost:
            return os.environ["TPU_SLICE_NAME"]
        if os.environ["EXECUTOR_CALL_INDEX"] == "1":
            os._exit(1)
        time.sleep(600)
        return None

    with SlicePool(KIND, max_retries_failure=0, grace_s=0.5, crash_grace_s=600) as pool:
        run = Run(pool.run, work)
        assert eventually(lambda: len(record.counts()) == 2, 120)
        new = spare()  # takes longer than grace_s
        assert run.is_alive()
        slices.kill(lost, 1)
        assert run.answer() == [new, new]
        assert record.counts() == {f"{lost}.0": 1, f"{lost}.1": 1, f"{new}.0": 1, f"{new}.1": 1}


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 2])
def test_a_host_dies_while_its_slice_is_taken(slices, spare, monkeypatch, count):
    """A run goes on with another slice if worker 0 dies while its port is leased (seam: the last lease before work).

    With one slice this is the port of its own coordinator, with two that of the coordinator of both.
    """
    lost, *others = names = [spare() for _ in range(count + 1)]
    lease_ports, calls = leases.lease_ports, []

    def lose(slots, **ports):
        calls.append(slots)
        if len(calls) == count:
            slices.kill(lost, 0)
        return lease_ports(slots, **ports)

    monkeypatch.setattr(leases, "lease_ports", lose)
    with SlicePool(KIND, count, max_retries_failure=0, max_retries_preemption=0) as pool:
        assert pool.run(lambda: os.environ["TPU_SLICE_NAME"]) == [name for name in others for _ in range(2)], names


@pytest.mark.nightly
def test_no_budget_for_losses(slices, spare, record, eventually):
    """Without a budget for preemptions, as a manager has none, the first loss ends the run, and the error says so."""
    lost = spare()
    with TpuRemoteManager(KIND) as manager:
        run = Run(manager.run_function, lambda: until_killed(record, lost))
        assert eventually(lambda: len(record.counts()) == 2, 120)
        slices.kill(lost, 0)
        with pytest.raises(PreemptionLimitError) as caught:
            run.answer()
        assert (caught.value.preemptions, caught.value.limit) == (1, 0)
        assert isinstance(caught.value.__cause__, SliceLostError)
        assert caught.value.__cause__.slices == (lost,)
        assert record.counts() == {f"{lost}.0": 1, f"{lost}.1": 1}


def test_collateral_errors(slices, spare, record, eventually):
    """An error that the death of another host caused is not a failure of the function."""
    lost = spare()

    def work():
        record.write()
        if os.environ["EXECUTOR_CALL_INDEX"] == "0":
            while not gone(record.of(f"{lost}.1")[0].split()[0]):
                time.sleep(0.01)
            raise ConnectionError("the other host hung up")
        time.sleep(600)

    config = TpuAcceleratorConfig(KIND, grace_s=60)
    run = Run(RayExecutor.execute, work, config)
    assert eventually(lambda: len(record.counts()) == 2, 120)
    slices.kill(lost, 1)
    status = run.answer()
    assert isinstance(status, JobPreempted)
    assert status.error.slices == (lost,)


def test_exactly_the_lost_slice_is_replaced(slices, spare):
    """When one of two slices is lost between two runs, the other keeps its placement group and its number."""
    names = [spare(), spare()]
    with SlicePool(KIND, 2) as pool:
        assert [one.slice_name for one in pool.slices] == names
        kept = pool.slots()[2].placement_group.id
        slices.remove(names[0])
        new = spare()
        assert pool.run(lambda: os.environ["TPU_SLICE_NAME"]) == [names[1]] * 2 + [new] * 2
        assert pool.slots()[0].placement_group.id == kept
        assert pool.statistics().reservations == 3


def test_a_preemption_notice(slices, spare, record, eventually):
    """A failure on a draining host is a preemption, and the slice is not used again."""
    lost = spare()
    node_id = slices.node_id(lost, 1)

    def work():
        record.write()
        if os.environ["TPU_SLICE_NAME"] != lost:
            return os.environ["TPU_SLICE_NAME"]
        while not (record.folder / "notice").exists():
            time.sleep(0.01)
        raise RuntimeError("stopped by a signal")

    with SlicePool(KIND, max_retries_failure=0) as pool:
        run = Run(pool.run, work)
        assert eventually(lambda: len(record.counts()) == 2, 120)
        client = ray._private.worker.global_worker.gcs_client
        deadline_ms = int((time.time() + 600) * 1000)
        assert client.drain_node(node_id, 2, "the provider said so", deadline_ms)[0]
        (record.folder / "notice").touch()
        new = spare()
        assert run.answer() == [new, new]


def test_incomplete_slices_are_never_used(slices, spare):
    """A slice that lacks a host, lacks worker 0, or has hosts of two types is never used; the error says why."""
    spare(name="no-worker-0", workers=(1,))
    spare(name="no-worker-1", workers=(0,))
    spare(name="two-types", workers=(0,))
    slices.add_host("two-types", 1, kind="v5p-32", topology="2x2x4")
    with pytest.raises(InsufficientSlicesError) as caught:
        RayExecutor.execute(lambda: None, TpuAcceleratorConfig(KIND, scale_timeout_s=0.5))
    assert {lack.slice_name: lack.reason for lack in caught.value.missing} == {
        "no-worker-0": "1 of 2 hosts, worker 0 is missing",
        "no-worker-1": "1 of 2 hosts, worker 1 is missing",
        "two-types": "its hosts have different labels: v5p-16, v5p-32",
    }
    with pytest.raises(InsufficientSlicesError, match="two-types"):
        RayExecutor.execute(lambda: None, TpuAcceleratorConfig("v5p-32", scale_timeout_s=0.5))


def test_capacity_that_arrives_late(slices, spare, pauses, eventually):
    """A slice that becomes whole during the wait is used."""
    name = spare(workers=(1,))
    run = Run(RayExecutor.execute, lambda: os.environ["TPU_SLICE_NAME"], TpuAcceleratorConfig(KIND))
    assert eventually(lambda: pauses, 60)
    slices.add_host(name, 0, kind=KIND)
    assert run.answer().result == [name, name]


def wanted():
    table = ray.util.placement_group_table().values()
    return [row for row in table if row["name"].startswith("fairlead-wanted") and row["state"] != "REMOVED"]


def test_an_autoscaler_that_reports_its_status(slices):
    """If an autoscaler has written its status, as Ray's own does once per round, the pool shows it what is missing."""
    report = {"active_nodes": {"head": 1}, "idle_nodes": {}, "node_type_mapping": {"0" * 56: "head"}}
    status = {"time": time.time(), "monitor_pid": os.getpid(), "autoscaler_report": report, "load_metrics_report": {}}
    before = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    _internal_kv_put(DEBUG_AUTOSCALING_STATUS, json.dumps(status), overwrite=True)
    try:
        config, shown = TpuAcceleratorConfig("v6e-16"), []
        scaling.show_missing(config, shown, 1)
        assert len(wanted()) == 1
        scaling.withdraw(config, shown, Head(30.0))
    finally:
        if before is None:
            _internal_kv_del(DEBUG_AUTOSCALING_STATUS)
        else:
            _internal_kv_put(DEBUG_AUTOSCALING_STATUS, before, overwrite=True)


def test_request_to_an_autoscaler(slices, monkeypatch, eventually):
    """The pool requests missing slices from an autoscaler, whole ones by type, and removes the requests afterwards."""
    # There is no autoscaler on this machine; Ray's own for tests would end every other Ray.
    monkeypatch.setattr(scaling, "autoscaler_is_there", lambda: True)
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], sleep=time.sleep)
    monkeypatch.setattr(reservation, "time", clock)
    run = Run(RayExecutor.execute, lambda: None, TpuAcceleratorConfig("v6e-16", scale_timeout_s=600))
    assert eventually(wanted, 120)
    (row,) = wanted()
    assert row["bundles"][0] == {"CPU": 2.0, "TPU": 4.0, "TPU-v6e-16-head": 1.0}
    assert [row["bundles"][at] for at in (1, 2, 3)] == [{"CPU": 2.0, "TPU": 4.0}] * 3
    passed_s[0] = 600.0
    with pytest.raises(InsufficientSlicesError, match="there are no others"):
        run.answer()
    assert wanted() == []


@pytest.mark.nightly
def test_interrupted(slices, record, eventually):
    """Ctrl-C ends a run on every host, and everything is given back before the caller sees the interrupt."""
    script = f"""
        import ray, sys, time, os
        from pathlib import Path
        from fairlead_placement.testing import assert_no_leaks
        from fairlead_tpu_executor import SlicePool
        from fairlead_tpu_executor._run import attempt

        attempt._CANCEL_S = 60.0  # on a busy machine
        ray.init(address={slices.address!r}, logging_level="error", log_to_driver=False)

        def forever():
            name = "{{TPU_SLICE_NAME}}.{{TPU_HOST_ID}}-0-0".format(**os.environ)
            Path({str(record.folder)!r}, name).write_text(str(os.getpid()))
            time.sleep(600)

        with assert_no_leaks():
            try:
                with SlicePool("v4-16", 2) as pool:
                    pool.run(forever)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert eventually(lambda: len(record.counts()) == 4 or process.poll() is not None, 120)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert (out, process.returncode) == ("interrupted\n", 0), err
    pids = [line for name in ("slice-1", "slice-2") for at in (0, 1) for line in record.of(f"{name}.{at}")]
    # They have ended, and wait for their raylets to reap them.
    assert all(gone(pid) or is_zombie(pid) for pid in pids)
    assert eventually(lambda: all(map(gone, pids)))


HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); {how}; print('held', flush=True); time.sleep(600)"


@pytest.mark.parametrize("how", ["fcntl.flock(f, fcntl.LOCK_EX)", "fcntl.lockf(f, fcntl.LOCK_EX)"])
def test_lock_of_another_process(slices, tmp_path, how):
    """A lock file that a living process has locked stays, as does the process; a stale file is removed."""
    path = tmp_path / "lock"
    path.touch()
    stranger = subprocess.Popen([sys.executable, "-c", HOLD.format(how=how), str(path)], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout.readline() == b"held\n"
        with SlicePool("v4-16", lock_files=[str(path)]) as pool:
            # One host only: on this machine hosts share their files, and would remove them together.
            assert pool.run_on_first_hosts(path.exists) == [True]
            assert stranger.poll() is None
            stranger.kill()
            stranger.wait()
            assert pool.run_on_first_hosts(path.exists) == [False]
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.nightly
def test_a_short_outage_while_processes_end(slices, spare, record, monkeypatch, stop_process):
    """A run goes on if Ray's head is silent while the other hosts' processes end (seam: the wait for their end)."""
    spare()
    wait, waits = attempt.run_on_nodes, []

    def wait_without_head(*args, timeout_s):
        waits.append(args)
        with stop_process(slices.head_pid) if len(waits) == 1 else contextlib.nullcontext():
            return wait(*args, timeout_s=timeout_s)

    def work():
        if record.meet() == 0:
            if os.environ["EXECUTOR_CALL_INDEX"] == "1":
                time.sleep(600)
            raise ValueError("the first attempt fails")

    monkeypatch.setattr(attempt, "run_on_nodes", wait_without_head)
    monkeypatch.setattr(attempt, "_CANCEL_S", 2.0)
    with SlicePool(KIND, max_retries_failure=1, max_retries_preemption=0, grace_s=0.1, crash_grace_s=0) as pool:
        assert pool.run(work) == [None, None]
    assert len(waits) == 1
