# SPDX-License-Identifier: Apache-2.0
"""The watch of a group: which events it reports, how often and where, and when it ends."""

import dataclasses
import gc
import itertools
import logging
import os
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import ray

from fairlead_inspect import stragglers, trace, watch
from fairlead_inspect._watch import EventFilter, Watch
from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, WorkerFailureError, WorkerGroupError, WorkerStatus, report_progress
from fairlead_workergroup._observe.evidence import RayWitnesses
from fairlead_workergroup.testing import hang, kill

pytestmark = pytest.mark.nightly


class Worker:
    def nothing(self):
        return None

    def stop_twice(self, folder):
        """Stand still, make progress and stand still again, each until a file exists."""
        for name, progresses in (("first", False), ("second", True), ("third", False)):
            while not os.path.exists(os.path.join(folder, name)):
                time.sleep(0.01)
                if progresses:
                    report_progress(step=1)


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4) as reserved:
        yield reserved


@pytest.fixture(scope="module")
def group(cluster):
    with RayWorkerGroup(cluster, Worker, name_prefix="watched") as watched:
        yield watched


def kinds_and_ranks(events):
    return [(event.kind, event.rank) for event in events]


STARTED = [("worker-started", rank) for rank in range(2)]


def open_watches():
    return [one for one in gc.get_objects() if isinstance(one, Watch) and "closed" not in repr(one)]


def test_each_event_once(group, eventually, caplog, monkeypatch, tmp_path):
    """Each event is reported once to `on_event` and to the log, with the stacks, however many looks there are."""
    caplog.set_level(logging.INFO, logger="fairlead_inspect")
    events, looks = [], []
    find_new = EventFilter.find_new

    def note_look(self, statuses):
        looks.append([status.state for status in statuses])
        return find_new(self, statuses)

    monkeypatch.setattr(EventFilter, "find_new", note_look)

    def wait_for_looks(rank, state, event):
        """Wait for an event, then for looks at a worker in a state, which may not report it again."""
        assert eventually(lambda: kinds_and_ranks(events)[-1] == event, 60), kinds_and_ranks(events)
        seen = len(looks)
        assert eventually(lambda: [look[rank] for look in looks[seen:]].count(state) >= 3, 60)

    def count_stuck(rank):
        """Return how often a worker that made progress was stuck at the next look."""
        states = [look[rank] for look in looks if look[rank] != "unknown"]
        return sum(now == "stuck" != before for before, now in itertools.pairwise(states))

    with watch(group, 0.05, 0.6, events.append, slow_after_s=0.3) as watching:
        assert repr(watching) == "Watch('watched', every 0.05 s)"
        assert eventually(lambda: kinds_and_ranks(events) == STARTED, 60)
        for number in (4, 6):
            with hang(group, 1, "native"):
                assert eventually(lambda: len(events) == number, 60)  # noqa: B023
                wait_for_looks(1, "stuck", ("worker-stuck", 1))
        hung = [("call-slow", 1), ("worker-stuck", 1)]
        assert kinds_and_ranks(events) == [*STARTED, *hung, *hung]
        # It gets on in between: stuck twice, in one call, which is slow once.
        call = group.at(worker=0).call("stop_twice", str(tmp_path))
        wait_for_looks(0, "stuck", ("worker-stuck", 0))
        (tmp_path / "first").touch()
        wait_for_looks(0, "busy", ("worker-stuck", 0))
        (tmp_path / "second").touch()
        assert eventually(lambda: count_stuck(0) >= 2, 60)
        wait_for_looks(0, "stuck", ("worker-stuck", 0))
        (tmp_path / "third").touch()
        call.result()
        # A busy machine may stop it in between for as long as counts as stuck.
        stuck = count_stuck(0)
        assert kinds_and_ranks(events[6:]) == [("call-slow", 0), *[("worker-stuck", 0)] * stuck]
    stuck = events[3]
    assert (stuck.method, stuck.coords, stuck.incarnation) == ("hang", {"worker": 1}, 0)
    assert stuck.stuck.where.endswith(" in hang")
    logged = [record for record in caplog.records if record.name == "fairlead_inspect"]
    assert [record.worker_event for record in logged] == events
    assert f"watched: {stuck.message}\n{stuck.stuck.stacks}" == logged[3].getMessage()
    assert stuck.message.startswith(f"worker-stuck: rank 1 (worker=1) on node {stuck.node_id[:8]}, pid {stuck.pid}: ")
    with pytest.raises(dataclasses.FrozenInstanceError):
        stuck.rank = 7


def test_on_event_that_fails(group, eventually, caplog):
    """An exception of `on_event` is logged, and the watch continues."""
    seen = []

    def fail(event):
        seen.append(event)
        raise KeyError(event.rank)

    with watch(group, 0.05, on_event=fail):
        assert eventually(lambda: len(seen) == 2)
    assert kinds_and_ranks(seen) == STARTED
    assert caplog.text.count("on_event failed at: worker-started") == 2


def test_dead_worker(cluster, eventually):
    """A death is reported once with its cause, and the next call knows it; the end of the group is not an event."""
    events = []
    with RayWorkerGroup(cluster, Worker) as group:
        watch(group, 0.05, on_event=events.append)
        assert eventually(lambda: kinds_and_ranks(events) == STARTED)
        kill(group, 1)
        assert eventually(lambda: len(events) > 2)
        time.sleep(0.3)
        assert kinds_and_ranks(events) == [*STARTED, ("worker-dead", 1)]
        assert ": killed: " in events[2].message
        assert group.worker_metadata[1]["state"] == "dead"
        with pytest.raises(WorkerFailureError, match="rank 1"):
            group.call("nothing")
    assert open_watches() == []
    assert len(events) == 3


def test_changes(cluster, eventually):
    """Resizes and replacements are events of the group, in their order, and a rank that left is none."""
    events = []
    with RayWorkerGroup(cluster, Worker, workers_per_node=[1]) as group, watch(group, 0.05, on_event=events.append):
        assert group.resize(worker=2) == 1
        assert group.resize(worker=1) == 2
        assert group.replace([0]) == 3
        assert eventually(lambda: "replaced" in [event.kind for event in events])
        time.sleep(0.3)  # for an event that there must not be, such as the death of a rank that left
    changes = [event for event in events if event.kind in ("resized", "replaced")]
    assert [(event.kind, event.rank) for event in changes] == [("resized", -1), ("resized", -1), ("replaced", 0)]
    assert changes[0].message == "resized: resized from worker=1 to worker=2 in epoch 1"
    assert {event.kind for event in events} <= {"resized", "replaced", "worker-started", "worker-restarted"}


def test_ended_group(cluster):
    """A group that has been shut down has no watch, no trace and no stragglers."""
    with RayWorkerGroup(cluster, Worker) as group:
        pass
    for ask in (watch, stragglers, lambda group: trace(group, "trace.json")):
        with pytest.raises(WorkerGroupError, match="has been shut down; make a new group"):
            ask(group)


def test_failed_look(cluster, eventually, monkeypatch, caplog):
    """The next look reports the events that a failed look had found."""
    events = []
    ask_ray, failed = RayWitnesses.ray, []

    def fail_once(witnesses, dead, within_s):
        if not failed:
            failed.append(dead)
            raise OSError("Ray does not say")
        return ask_ray(witnesses, dead, within_s)

    monkeypatch.setattr(RayWitnesses, "ray", fail_once)
    with RayWorkerGroup(cluster, Worker) as group, watch(group, 0.05, on_event=events.append):
        assert eventually(lambda: kinds_and_ranks(events) == STARTED)
        kill(group, 1)
        assert eventually(lambda: kinds_and_ranks(events) == [*STARTED, ("worker-dead", 1)])
    assert "Ray does not say" in caplog.text


def test_close(group, eventually):
    """A watch can be closed twice, also from `on_event`; it reports nothing afterwards; other watches continue."""
    events, others = [], []
    other = watch(group, 0.05, on_event=others.append)
    watching = watch(group, 0.05, on_event=lambda event: (events.append(event), watching.close()))
    assert eventually(lambda: repr(watching) == "Watch('watched', closed)")
    watching.close()
    assert kinds_and_ranks(events) == STARTED[:1]
    assert repr(watching) == "Watch('watched', closed)"
    assert eventually(lambda: kinds_and_ranks(others) == STARTED)
    other.close()
    other.close()
    assert open_watches() == []


def test_memory_of_closed_watches(group, eventually):
    """A closed watch holds no memory, so that a long run can start a watch for each epoch."""
    closed = []
    for _ in range(3):
        with watch(group) as watching:
            closed.append(weakref.ref(watching))
    del watching
    assert eventually(lambda: gc.collect() >= 0 and not any(one() for one in closed))


def test_shutdown_from_on_event(cluster, eventually):
    """`on_event` may shut the group down."""
    group = RayWorkerGroup(cluster, Worker)
    ended = []
    watch(group, 0.05, on_event=lambda event: ended.append(group.shutdown()))
    assert eventually(lambda: ended)
    assert ended == [True]
    assert eventually(lambda: open_watches() == [])


def test_dropped_group(cluster, eventually):
    """A watch does not keep a group alive that has no other references."""
    group = RayWorkerGroup(cluster, Worker)
    watch(group, 0.05)
    gone = weakref.ref(group)
    del group
    assert eventually(lambda: gc.collect() is not None and gone() is None)
    assert eventually(lambda: open_watches() == [])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("interval_s", {"interval_s": 0}),
        ("stuck_after_s", {"stuck_after_s": -1}),
        ("slow_after_s", {"slow_after_s": ""}),
    ],
)
def test_bad_arguments(group, name, options):
    """Values that are not a positive number of seconds are refused, and nothing is started."""
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds"):
        watch(group, **options)
    assert open_watches() == []


def status(state, incarnation=0, calls=1, since=0.0):
    method = "step" if state in ("busy", "stuck") else None
    return WorkerStatus(0, "", {}, state, "n", 1, method, since_progress_s=since, calls=calls, incarnation=incarnation)


def test_event_filter():
    """After each look exactly the new events are reported."""
    events = EventFilter(slow_after_s=10.0)
    for now, expected in [
        (status("starting"), []),
        (status("idle"), ["worker-started"]),
        (status("busy", since=11), ["call-slow"]),
        (status("stuck", since=20), ["worker-stuck"]),
        (status("stuck", since=30), []),
        (status("unknown"), []),
        (status("stuck", since=40), []),
        (status("stuck", calls=2, since=20), ["call-slow", "worker-stuck"]),
        (status("busy", calls=2, since=1), []),
        (status("stuck", calls=2, since=20), ["worker-stuck"]),
        (status("dead"), ["worker-dead"]),
        (status("dead"), []),
        (status("restarting"), []),
        (status("starting", incarnation=1), []),
        (status("idle", incarnation=1), ["worker-restarted"]),
        (status("stuck", incarnation=1, since=20), ["call-slow", "worker-stuck"]),
        (status("dead", incarnation=1), ["worker-dead"]),
        (status("idle", incarnation=2), ["worker-restarted"]),
        (status("idle", incarnation=3), ["worker-restarted"]),  # with the whole group, or between two looks
    ]:
        assert [kind for kind, _ in events.find_new([now])] == expected, now
    late = EventFilter(10.0)
    assert [kind for kind, _ in late.find_new([status("dead")])] == ["worker-dead"]
    assert [kind for kind, _ in late.find_new([status("idle", incarnation=1)])] == ["worker-restarted"]


def run(code, *arguments, **env):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        # Ray's own warnings are not ours, of some versions about their own future.
        env={**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning", **env},
    )


@pytest.mark.parametrize(
    "end", ["", "ray.shutdown(); [one.close() for one in watches]; assert not ray.is_initialized()"]
)
def test_interpreter_exit(local_ray, end):
    """A driver that ends during a watch prints nothing and does not hang; a watch does not start Ray again."""
    source = f"""
        import sys, time, threading, ray
        from fairlead_inspect import watch
        from fairlead_placement import RayVirtualCluster
        from fairlead_workergroup import RayWorkerGroup
        ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
        cluster = RayVirtualCluster([1], use_gpus=False)
        group = RayWorkerGroup(cluster, "collections.Counter")
        watches = [watch(group, 0.001), watch(group, 0.5)]
        time.sleep(0.5)
        {end}
    """
    done = run(source, ray.get_runtime_context().gcs_address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_metrics(unused_port):
    """With ray[default] Ray's metrics count the events by group and kind, and have the age of each rank's weights."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    source = f"""
        import sys, time, urllib.request
        import ray
        from fairlead_inspect import watch
        from fairlead_placement import RayVirtualCluster
        from fairlead_workergroup import RayWorkerGroup
        from fairlead_workergroup.testing import kill
        class Model:
            def take(self, version):
                sys.modules["_fairlead_worker"].record.note_weights(version)  # as a link does
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False,
            _metrics_export_port={unused_port}, _system_config={{"metrics_report_interval_ms": 1000}},
        )
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Model, name_prefix="train") as group,
            watch(group, 0.1),
        ):
            def wait_for(*parts):
                deadline = time.monotonic() + 90
                while True:
                    time.sleep(0.5)
                    try:
                        text = urllib.request.urlopen("http://127.0.0.1:{unused_port}/metrics", timeout=30).read()
                    except OSError:
                        text = b""  # not up yet
                    lines = [one for one in text.decode().splitlines() if one.startswith("ray_fairlead_worker_")]
                    ages = [line for line in lines if "weights_age_seconds" in line]
                    if len(ages) == 2 and all(part in "".join(lines) for part in parts):
                        return lines
                    assert time.monotonic() < deadline, lines

            group.call("take", 3).result()
            wait_for("worker-started")  # a look has seen the weights of both ranks
            kill(group, 1)
            print(*wait_for("worker-started", "worker-dead", " -1.0"), sep="\\n")
    """
    done = run(source, RAY_AUTH_MODE="disabled")  # otherwise Ray prints a warning about tokens
    assert done.returncode == 0, done.stderr
    counts = {
        kind: line for line in done.stdout.splitlines() for kind in ("dead", "started") if f"worker-{kind}" in line
    }
    assert set(counts) == {"dead", "started"}
    assert all('group="train"' in line for line in counts.values())
    assert float(counts["dead"].split()[-1]) == 1
    ages = [line for line in done.stdout.splitlines() if "weights_age_seconds" in line]
    age = {rank: float(line.split()[-1]) for rank in (0, 1) for line in ages if f'rank="{rank}"' in line}
    assert 0 < age[0] < 120
    assert age[1] == -1.0
