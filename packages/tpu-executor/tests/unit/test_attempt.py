# SPDX-License-Identifier: Apache-2.0
"""When the outcome of an attempt is clear, by what its hosts have shown and how long ago. With Ray: tests/ray."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError, WorkerCrashedError

from fairlead_tpu_executor import SliceInfo
from fairlead_tpu_executor._run import attempt
from fairlead_tpu_executor._run.attempt import HostCall

ONE = SliceInfo("a", 2, "1", 4, ("a0", "a1"), ("1", "2"), "v4-16")
HEAD = SimpleNamespace(call=lambda function, *args: function(*args))
SCOPE = SimpleNamespace(head=HEAD, grace_s=2.0, crash_grace_s=60.0)
RAISED = RayTaskError("train", "", ValueError("mine"))


@pytest.fixture
def nodes(monkeypatch):
    """The nodes that are gone, dead and silent, which tests add to."""
    nodes = SimpleNamespace(gone=set(), dead=set(), silent=set())
    for name in ("gone", "dead", "silent"):
        monkeypatch.setattr(attempt, f"{name}_nodes", lambda ids, name=name: getattr(nodes, name) & set(ids))
    return nodes


def is_clear(waited_s, *outcomes):
    """Return whether it is clear, and the number of errors; an outcome is an error, "done" or "running"."""
    calls = []
    for worker, outcome in enumerate(outcomes):
        target = SimpleNamespace(slice=ONE, worker=worker, node_id=ONE.node_ids[worker])
        error = outcome if isinstance(outcome, Exception) else None
        calls.append(HostCall(target, None, error=error, done=outcome != "running"))
    errors = [call.blame(call.error) for call in calls if call.error is not None]
    clear = attempt._is_clear(errors, calls, SCOPE, waited_s)
    return clear, len(errors)


def test_exceptions_of_the_function(nodes):
    """An exception on every host is clear; while others run, it may follow from a loss for the grace period."""
    assert is_clear(0.0, RAISED, RAISED)[0]
    assert is_clear(0.0, RAISED, "done")[0]
    assert not is_clear(1.9, RAISED, "running")[0]
    assert is_clear(2.0, RAISED, "running")[0]


def test_a_process_died(nodes):
    """The death of a process may be the first sign of a preemption, for longer than an exception."""
    crash = WorkerCrashedError()
    for others in ("running", "done", RAISED):
        assert not is_clear(59.9, crash, others)[0]
        assert is_clear(60.0, crash, others)[0]
    nodes.gone.add("a0")
    assert is_clear(5.0, crash, "running")[0]


def test_a_node_is_silent(nodes):
    """A dead node explains the others at once, a silent one after the grace period."""
    crash = WorkerCrashedError()
    nodes.silent.add("a0")
    assert is_clear(1.9, crash, "running") == (False, 1)
    assert is_clear(2.0, crash, "running") == (True, 2)
    nodes.dead.add("a1")
    assert is_clear(0.0, crash, "running") == (True, 2)
