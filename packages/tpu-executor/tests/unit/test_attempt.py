# SPDX-License-Identifier: Apache-2.0
"""When the outcome of an attempt is clear, by what its hosts have shown and how long ago. With Ray: tests/ray."""

from types import SimpleNamespace

from ray.exceptions import RayTaskError, WorkerCrashedError

from fairlead_tpu_executor import SliceInfo
from fairlead_tpu_executor._attempt import HostCall, is_clear

ONE = SliceInfo("a", 2, "1", 4, ("a0", "a1"), ("1", "2"), "v4-16")
RAISED = RayTaskError("train", "", ValueError("mine"))


def clear(waited_s, *outcomes, gone=()):
    """Return whether it is clear; an outcome is an error, "done" or "running"."""
    calls = []
    for worker, outcome in enumerate(outcomes):
        target = SimpleNamespace(slice=ONE, worker=worker, node_id=ONE.node_ids[worker])
        error = outcome if isinstance(outcome, Exception) else None
        calls.append(HostCall(target, None, error=error, done=outcome != "running"))
    errors = [call.blame(call.error) for call in calls if call.error is not None]
    return is_clear(errors, calls, set(gone), waited_s, 2.0)


def test_exceptions_of_the_function():
    """An exception on every host is clear; while others run, it may follow from a loss for the grace period."""
    assert clear(0.0, RAISED, RAISED)
    assert clear(0.0, RAISED, "done")
    assert not clear(1.9, RAISED, "running")
    assert clear(2.0, RAISED, "running")


def test_a_process_died():
    """The death of a process may be the first sign of a preemption; a host that is gone explains it at once."""
    for others in ("running", "done", RAISED):
        assert not clear(1.9, WorkerCrashedError(), others)
        assert clear(2.0, WorkerCrashedError(), others)
    assert clear(0.0, WorkerCrashedError(), "running", gone=["a0"])
