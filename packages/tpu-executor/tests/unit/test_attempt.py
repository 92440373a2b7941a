# SPDX-License-Identifier: Apache-2.0
"""When the outcome of an attempt is clear, by what its hosts have shown and how long ago. With Ray: tests/ray."""

from ray.exceptions import RayTaskError, WorkerCrashedError

from fairlead_tpu_executor import SliceInfo
from fairlead_tpu_executor._attempt import is_clear
from fairlead_tpu_executor._verdicts import HostError

ONE = SliceInfo("a", 2, "1", 4, ("a0", "a1"), ("1", "2"), "v4-16")
RAISED = RayTaskError("train", "", ValueError("mine"))


def clear(*errors, is_running=False, is_late=False, gone=()):
    hosts = [HostError(ONE, worker, error) for worker, error in enumerate(errors)]
    return is_clear(hosts, set(gone), is_running=is_running, is_late=is_late)


def test_exceptions_of_the_function():
    """An exception on every host is clear; while others run, it may follow from a loss for the grace period."""
    assert clear(RAISED, RAISED)
    assert clear(RAISED)
    assert not clear(RAISED, is_running=True)
    assert clear(RAISED, is_running=True, is_late=True)


def test_a_process_died():
    """The death of a process may be the first sign of a preemption; a host that is gone explains it at once."""
    for errors in ((WorkerCrashedError(),), (WorkerCrashedError(), RAISED)):
        for is_running in (True, False):
            assert not clear(*errors, is_running=is_running)
            assert clear(*errors, is_running=is_running, is_late=True)
    assert clear(WorkerCrashedError(), is_running=True, gone=["a0"])
