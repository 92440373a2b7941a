# SPDX-License-Identifier: Apache-2.0
"""Runs lose hosts, slices stay incomplete, and other processes are not harmed."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import ray

from fairlead_placement import extension
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
from fairlead_tpu_executor import _reservation as reservation

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
        assert record.counts() == {f"{lost}.0": 1, f"{lost}.1": 1, f"{new}.0": 1, f"{new}.1": 1}
        pids = [line.split()[0] for worker in (0, 1) for line in record.of(f"{lost}.{worker}")]
        assert eventually(lambda: all(map(gone, pids)))


@pytest.mark.nightly
def test_a_host_dies_while_its_slice_is_taken(slices, spare, monkeypatch):
    """A run goes on with another slice if worker 0 dies while its port is leased (seam: the lease)."""
    lost, other = spare(), spare()
    lease_ports, calls = reservation.lease_ports, []

    def lose(slots, **ports):
        calls.append(slots)
        if len(calls) == 1:
            slices.kill(lost, 0)
        return lease_ports(slots, **ports)

    monkeypatch.setattr(reservation, "lease_ports", lose)
    with SlicePool(KIND, max_retries_failure=0, max_retries_preemption=0) as pool:
        assert pool.run(lambda: os.environ["TPU_SLICE_NAME"]) == [other, other]


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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_exactly_the_lost_slice_is_replaced(slices, spare):
    """When one of two slices is lost between two runs, the other keeps its placement group and its number."""
    names = sorted([spare(), spare()])
    with SlicePool(KIND, 2) as pool:
        assert [one.slice_name for one in pool.slices] == names
        kept = pool.slots()[2].placement_group.id
        slices.remove(names[0])
        new = spare()
        assert pool.run(lambda: os.environ["TPU_SLICE_NAME"]) == [names[1]] * 2 + [new] * 2
        assert pool.slots()[0].placement_group.id == kept


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


@pytest.mark.nightly
def test_incomplete_slices_are_never_used(slices, spare):
    """A slice that lacks a host, lacks worker 0, or has hosts of two types is never used; the error says why."""
    spare(name="no-worker-0", workers=(1,))
    spare(name="no-worker-1", workers=(0,))
    spare(name="two-types", workers=(0,))
    slices.add_host("two-types", 1, kind="v5p-32", topology="2x2x4")
    with pytest.raises(InsufficientSlicesError) as caught:
        RayExecutor.execute(lambda: None, TpuAcceleratorConfig(KIND, scale_timeout_s=0.5))
    assert caught.value.missing == {
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
    """Return the requests that an autoscaler sees, as the numbers of heads of slices: what Ray has not placed."""
    table = ray.util.placement_group_table().values()
    pending = [row["bundles"].values() for row in table if row["state"] == "PENDING"]
    return [sum(bundle.get(f"TPU-{KIND}-head", 0.0) for bundle in bundles) for bundles in pending]


@pytest.mark.nightly
def test_request_to_an_autoscaler(slices, spare, monkeypatch, eventually):
    """The pool requests all slices that it does not hold, holds no free one meanwhile, and takes those that come."""
    # There is no autoscaler on this machine; Ray's own for tests would end every other Ray.
    monkeypatch.setattr(extension, "autoscaler_is_there", lambda: True)
    names = [spare()]
    run = Run(RayExecutor.autoscale_execute, lambda: os.environ["TPU_SLICE_NAME"], TpuAcceleratorConfig(KIND, 2))
    assert eventually(lambda: wanted() == [2.0], 120), wanted()
    # The request is steady, and another job can use the slice that is free.
    with SlicePool(KIND) as other:
        assert [place.slice_name for place in other.slices] == names
        assert other.run(lambda: os.environ["TPU_SLICE_NAME"]) == names * 2
        assert wanted() == [2.0]
    assert wanted() == [2.0]
    names.append(spare())
    assert run.answer(300).result == [name for name in names for _ in range(2)]
    assert wanted() == []


@pytest.mark.nightly
def test_no_answer_of_an_autoscaler(slices, spare, monkeypatch):
    """When the scale timeout ends, so does the request; a smaller allowed number of slices is accepted."""
    monkeypatch.setattr(extension, "autoscaler_is_there", lambda: True)
    with pytest.raises(InsufficientSlicesError, match="there are no others"):
        RayExecutor.execute(lambda: None, TpuAcceleratorConfig(KIND, scale_timeout_s=1))
    name = spare()
    config = TpuAcceleratorConfig(KIND, [1, 2], scale_timeout_s=3)
    assert RayExecutor.autoscale_execute(lambda: os.environ["TPU_SLICE_NAME"], config).result == [name, name]
    assert wanted() == []


OTHER_JOB = """
    import os, ray, sys, time
    from fairlead_tpu_executor import InsufficientSlicesError, SlicePool
    ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
    try:
        with SlicePool("v5p-16", 2, scale_timeout_s=float(sys.argv[2])) as pool:
            print([place.slice_name for place in pool.slices], flush=True)
            sys.stdin.readline()
    except InsufficientSlicesError as error:
        print(error.available, len(error.missing), flush=True)
"""


@pytest.mark.nightly
def test_two_jobs_want_the_same_slices(slices, spare):
    """Of two jobs that want two of three slices, one gets them; the other ends at its deadline, and holds nothing."""
    names = sorted(spare() for _ in range(3))
    command = [sys.executable, "-c", textwrap.dedent(OTHER_JOB), slices.address, "20"]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen(command, **pipe) for _ in range(2)]
    try:
        answers = [job.stdout.readline().strip() for job in jobs]
        assert sorted(answers) == ["1 2", str(names[:2])]
        for job in jobs:
            job.communicate("\n", timeout=150)
        with SlicePool(KIND, 3) as pool:
            assert sorted(place.slice_name for place in pool.slices) == names
    finally:
        for job in jobs:
            job.kill()
            job.wait()


@pytest.mark.nightly
def test_interrupted(slices, record, eventually):
    """Ctrl-C ends a run on every host, and everything is given back before the caller sees the interrupt."""
    script = f"""
        import ray, sys, time, os
        from pathlib import Path
        from fairlead_placement.testing import assert_no_leaks
        from fairlead_tpu_executor import SlicePool
        from fairlead_tpu_executor import _attempt as attempt

        attempt.CANCEL_S = 60.0  # on a busy machine
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


def test_lock_of_another_process(slices, record, tmp_path_factory):
    """A host waits for the end of a process that has libtpu's lock, and does not harm it."""
    path = tmp_path_factory.mktemp("locked") / "lock"
    path.touch()
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, 2); print(flush=True); time.sleep(600)"
    stranger = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout.readline() == b"\n"
        with SlicePool("v4-16", lock_files=[str(path)]) as pool:
            run = Run(pool.run, record.write)
            time.sleep(2.0)
            assert record.counts() == {}
            assert stranger.poll() is None
            stranger.kill()
            assert run.answer() == [0, 0]
            assert path.exists()
    finally:
        stranger.kill()
        stranger.wait()
