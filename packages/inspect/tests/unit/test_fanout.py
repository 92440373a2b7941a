# SPDX-License-Identifier: Apache-2.0
"""A look at a large cluster, simulated where requests leave: Ray's tables and the probes."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, JOB, NOW, QUEUE, RAY, actor, environ

from fairlead_inspect import _fanout, diagnose
from fairlead_inspect._show import to_json
from fairlead_inspect.model import Job
from fairlead_placement import HeadTimeoutError, PlacementTimeoutError

NODES, EACH, SILENT = 250, 8, 12


def answer(numbers):
    """Return what the probe of a node answers about some ranks, of which the first job's rank 37 hangs."""
    stacks = [[(one.file, one.function, one.line) for one in (*stack, *RAY)] for stack in (ALL_REDUCE, QUEUE)]
    rows = []
    for number in numbers:
        fleet, rank = divmod(number, 500)
        thread = (
            1000 + number,
            "MainThread",
            int((fleet, rank) == (0, 37)),
            -1,
            ("S", "S"),
            0,
            0,
            100.0,
            False,
            [],
            0,
            "",
        )
        fields = environ(rank, 500, fleet), [], 2**30, "", "", []
        rows.append((1000 + number, "ray::W.train", ("S", "S"), 0, 1.0, [thread], *fields))
    return {"processes": rows, "stacks": stacks, "notes": [], "took_s": 1.2}


@pytest.fixture
def large(monkeypatch):
    """250 nodes with 2,000 actors in 4 fleets; the last 12 nodes do not answer."""
    names = [f"n{at}" for at in range(NODES)]
    actors = [actor(at, f"W{at // 500}", node_id=names[at // EACH]) for at in range(NODES * EACH)]
    rows = [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{at}", "Alive": True} for at, name in enumerate(names)]
    tables = SimpleNamespace(
        check_ray=lambda: None,
        read_jobs=lambda job_id: [Job(JOB, "train.py", 811, "n0", "driver")] * (job_id in (None, JOB)),
        read_actors=lambda job: actors,
        read_calls=lambda job: ([], frozenset(), {}),
        read_reservations=list,
        read_launches=lambda: 0,
    )
    monkeypatch.setattr(_fanout, "_ray_private", tables)
    monkeypatch.setattr(_fanout, "read_labels", lambda *_: ({}, []))
    monkeypatch.setattr(_fanout, "ask_head", lambda what, function, *args, timeout_s: function(*args))
    monkeypatch.setattr(ray, "nodes", lambda: rows)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "ff000000"))

    def probe(wanted, window_s, timeout_s):
        found = {name: answer(sorted(pid - 1000 for pid in pids)) for name, (pids, _) in wanted.items()}
        return found | dict.fromkeys(names[-SILENT:], "no answer within 4.0 s")

    monkeypatch.setattr(_fanout, "_probe", probe)
    return tables


def test_a_probe_that_fails(monkeypatch):
    """The note of its node says what went wrong, in the last line of the traceback (seam: functions on nodes)."""
    error = ray.exceptions.RayError("ray::_look_here()\n  File look.py\nModuleNotFoundError: No module named 'x'")
    late = PlacementTimeoutError("The function has not returned")
    monkeypatch.setattr(_fanout, "find_here", lambda nodes: frozenset())
    monkeypatch.setattr(_fanout, "run_on_nodes", lambda *_, **__: {"a" * 56: error, "b" * 56: late})
    answers = _fanout._probe({"a" * 56: ({1}, set()), "b" * 56: ({1}, set())}, 1.0, 1.0)
    assert answers == {
        "a" * 56: "the probe failed: ModuleNotFoundError: No module named 'x'",
        "b" * 56: "no answer within 1.0 s",
    }


def test_own_node(monkeypatch):
    """Processes that this one sees are looked at without a task; if the kernel holds the look up, it says so (seam)."""
    here, other = "a" * 56, "b" * 56
    monkeypatch.setattr(_fanout, "find_here", lambda nodes: {here, other})
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        wanted = {here: ({os.getpid()}, set()), other: ({2**22 + 1}, {child.pid})}
        answers = _fanout._probe(wanted, 0.0, 60.0)
        child.communicate()
    rows = {node: [row[0] for row in answer["processes"]] for node, answer in answers.items()}
    assert rows == {here: [os.getpid()], other: [child.pid]}
    over = threading.Event()
    monkeypatch.setattr(_fanout, "look_from_task", lambda *_: over.wait())
    assert _fanout._probe(wanted, 0.0, 0.1) == dict.fromkeys([here, other], "no answer within 0.1 s")
    over.set()


ALONE = """
import os, ray, sys
sys.modules.update(fairlead_inspect=None, fairlead_placement=None)
task = ray.cloudpickle.loads(sys.stdin.buffer.read())
print(*(row[0] for row in task([os.getpid()], [], 0.0, 5.0)["processes"]), os.getpid())
"""


def test_a_node_without_fairlead():
    """The function of a probe runs in a Python that cannot import this package."""
    sent = ray.cloudpickle.dumps(_fanout.look_from_task)
    done = subprocess.run([sys.executable, "-c", ALONE], input=sent, capture_output=True, timeout=60, check=False)
    looked_at, own = done.stdout.split() or ("", done.stderr.decode())
    assert looked_at == own


def test_simulated_cluster(large):
    """Of 250 nodes 12 are silent: the verdict about a fleet without members there is the same, and they are listed."""
    began = time.process_time()
    snapshot = _fanout.look_at_cluster(None)
    found = diagnose(snapshot, after_s=60)
    fields = to_json(snapshot, found)
    assert time.process_time() - began < 10  # 0.5 s on a machine that does nothing else
    assert [(one.kind, one.fleet, one.ranks) for one in found if one.blames] == [("late", "W0", (37,))]
    assert len(fields["unanswered"]) == SILENT
    assert fields["complete"] is False
    # The fleet that has members there is not judged by those that answered.
    assert not any(one.blames for one in found if one.fleet == "W3")


def test_without_task_events(large):
    """If Ray's head does not answer about tasks, the rest of the look is still there."""

    def fail(job):
        raise HeadTimeoutError("no answer")

    large.read_calls = fail
    snapshot = _fanout.look_at_cluster(None)
    assert snapshot.notes == (f"no task events of job {JOB}: HeadTimeoutError",)
    assert [one.ranks for one in diagnose(snapshot) if one.blames] == [(37,)]


def test_without_groups(large, monkeypatch):
    """If Fairlead's groups cannot be read, the look says so, and the rest of it is still there."""

    def fail(*_):
        raise HeadTimeoutError("no answer")

    monkeypatch.setattr(_fanout, "read_labels", fail)
    snapshot = _fanout.look_at_cluster(None)
    assert snapshot.notes == ("no groups of Fairlead: HeadTimeoutError",)
    assert [one.ranks for one in diagnose(snapshot) if one.blames] == [(37,)]


def test_other_job(large):
    """A job that is not there gives an empty look."""
    assert _fanout.look_at_cluster("77000000").jobs == ()
    assert _fanout.look_at_cluster(JOB).looked_at > NOW
