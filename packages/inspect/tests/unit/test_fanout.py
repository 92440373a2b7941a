# SPDX-License-Identifier: Apache-2.0
"""A snapshot of a large cluster, simulated where requests leave: Ray's tables and the probes."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, JOB, NOW, QUEUE, RAY, actor, as_json, environ

from fairlead_inspect import _fanout, diagnose, look
from fairlead_inspect.model import Job
from fairlead_placement import HeadTimeoutError, PlacementTimeoutError

NODES, EACH, SILENT = 250, 8, 12


def answer(numbers):
    """Return what the probe of a node answers about some ranks, of which the first job's rank 37 hangs."""
    hung, meets = (tuple((one.file, one.function, one.line) for one in (*stack, *RAY)) for stack in (QUEUE, ALL_REDUCE))
    rows = []
    for number in numbers:
        group, rank = divmod(number, 500)
        stack = hung if (group, rank) == (0, 37) else meets
        thread = {"tid": 1000 + number, "stack": stack, "before": None, "ticks": 0, "switches": 0}
        thread |= {"last_ran_s": 100.0, "references": [], "request": None}
        row = {"pid": 1000 + number, "title": "ray::W.train", "threads": [thread], "children": [], "records": []}
        rows.append(row | {"environ": environ(rank, 500, group)})
    return {"processes": rows, "notes": []}


@pytest.fixture
def large(monkeypatch):
    """250 nodes with 2,000 actors in 4 worker sets; the last 12 nodes do not answer."""
    names = [f"n{at}" for at in range(NODES)]
    actors = [actor(at, f"W{at // 500}", node_id=names[at // EACH]) for at in range(NODES * EACH)]
    rows = [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{at}", "Alive": True} for at, name in enumerate(names)]
    tables = SimpleNamespace(
        check_ray=lambda: None,
        read_jobs=lambda job_id: [Job(JOB, "train.py", 811, "n0", "driver")] * (job_id in (None, JOB)),
        read_actors=lambda job: actors,
        read_calls=lambda job: ([], {}, {}),
        read_reservations=list,
        read_launches=lambda: 0,
    )
    monkeypatch.setattr(_fanout, "_ray_private", tables)
    monkeypatch.setattr(_fanout, "read_labels", lambda *_: ({}, []))
    monkeypatch.setattr(ray, "nodes", lambda: rows)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    def probe(function, arguments, *, timeout_s):
        answers = {name: answer(sorted(pid - 1000 for pid in pids)) for name, (pids, *_) in arguments.items()}
        return answers | dict.fromkeys(names[-SILENT:], PlacementTimeoutError("late"))

    monkeypatch.setattr(_fanout, "run_on_nodes", probe)
    return tables


def test_a_probe_that_fails(large, monkeypatch):
    """The note of its node says what went wrong, in the last line of the traceback (seam: functions on nodes)."""
    error = ray.exceptions.RayError("ray::_look_here()\n  File look.py\nModuleNotFoundError: No module named 'x'")
    monkeypatch.setattr(_fanout, "run_on_nodes", lambda function, arguments, **_: dict.fromkeys(arguments, error))
    notes = {node.note for node in look().nodes}
    assert notes == {"the probe failed: ModuleNotFoundError: No module named 'x'"}


ALONE = """
import os, ray, sys
sys.modules.update(fairlead_inspect=None, fairlead_placement=None)
task = ray.cloudpickle.loads(sys.stdin.buffer.read())
print(*(row["pid"] for row in task([os.getpid()], [], 0.0, 5.0)["processes"]), os.getpid())
"""


def test_a_node_without_fairlead():
    """The function of a probe runs in a Python that cannot import this package."""
    sent = ray.cloudpickle.dumps(_fanout.look)
    done = subprocess.run([sys.executable, "-c", ALONE], input=sent, capture_output=True, timeout=60, check=False)
    looked_at, own = done.stdout.split() or ("", done.stderr.decode())
    assert looked_at == own


def test_simulated_cluster(large):
    """Of 250 nodes 12 are silent: the verdict about a worker set that has no members there is the same.

    Silent nodes are listed.
    """
    began = time.process_time()
    snapshot = look()
    found = diagnose(snapshot, after_s=60)
    fields = as_json(snapshot)
    assert time.process_time() - began < 10  # 0.5 s on a machine that does nothing else
    assert [(one.kind, one.worker_set, one.ranks) for one in found if one.blames] == [("late", "W0", (37,))]
    assert len(fields["unanswered"]) == SILENT
    assert fields["complete"] is False
    # The one that has members there is not judged by those that answered.
    assert not any(one.blames for one in found if one.worker_set == "W3")


def fail(*_):
    raise HeadTimeoutError("no answer")


@pytest.mark.parametrize(
    ("part", "note"),
    [
        ("read_calls", f"no task events of job {JOB}: HeadTimeoutError"),
        ("read_reservations", "no placement groups: HeadTimeoutError"),
        ("read_launches", "no nodes that an autoscaler starts: HeadTimeoutError"),
        ("read_labels", "no groups of Fairlead: HeadTimeoutError"),
    ],
)
def test_without_a_part(large, monkeypatch, part, note):
    """If Ray's head or a board does not answer, the snapshot says so, and the rest of it is still there."""
    monkeypatch.setattr(large if hasattr(large, part) else _fanout, part, fail)
    snapshot = look()
    assert snapshot.notes == (note,)
    assert [one.ranks for one in diagnose(snapshot) if one.blames] == [(37,)]


def test_other_job(large):
    """A job that is not there is refused."""
    with pytest.raises(ValueError, match="There is no running job '77000000'"):
        look(job="77000000")
    assert look(job=JOB).looked_at > NOW
