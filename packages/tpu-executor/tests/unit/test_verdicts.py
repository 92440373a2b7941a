# SPDX-License-Identifier: Apache-2.0
"""Whose failure it was, from exception types and the state of nodes."""

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
    TaskCancelledError,
    TaskPlacementGroupRemoved,
    WorkerCrashedError,
)

from fairlead_tpu_executor import (
    JobError,
    JobFailed,
    JobInfo,
    JobPreempted,
    SliceInfo,
    SliceLostError,
    handle_ray_error,
)
from fairlead_tpu_executor._run.verdicts import (
    STARTUP_FAILURES,
    HostError,
    NodeSilentError,
    StartFailures,
    judge,
    judge_one,
)

SLICE = SliceInfo("a", 2, "10.0.0.1", 4, ("n0", "n1"), ("10.0.0.1", "10.0.0.2"), "v4-16", "2x2x2")
INFO = JobInfo("train", slices=(SLICE,))


def raised(cause):
    """Return the exception as `ray.get` raises it: in a class that derives from both."""
    return RayTaskError(
        "train", f"Traceback: ... preempted ... No accelerator found\n{cause!r}", cause
    ).as_instanceof_cause()


class Preempted(ActorDiedError):
    preempted = True


class InitFailed(ActorDiedError):
    actor_init_failed = True


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (raised(ValueError("x")), "failed"),
        (raised(RuntimeError("the slice was preempted")), "failed"),
        (raised(MemoryError()), "failed"),
        (raised(WorkerCrashedError()), "failed"),
        (raised(ActorDiedError()), "failed"),
        (raised(NodeDiedError("somebody's actor's")), "failed"),
        (WorkerCrashedError(), "failed"),
        (OutOfMemoryError("x"), "failed"),
        (ActorDiedError(), "failed"),
        (InitFailed(), "failed"),
        (Preempted(), "preempted"),
        (raised(Preempted()), "preempted"),
        (NodeDiedError("x"), "preempted"),
        (NodeSilentError("x"), "preempted"),
        (TaskPlacementGroupRemoved(), "preempted"),
        (OwnerDiedError("0" * 56, b"", ""), "error"),
        (ObjectLostError("0" * 56, b"", ""), "error"),
        (TaskCancelledError(), "error"),
        *((raised(RuntimeError(f"UNKNOWN: {text} /dev/vfio/0")), "preempted") for text in STARTUP_FAILURES),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_one_error(error, kind):
    """On a live node the type of the exception decides; on a node that is gone every error is the infrastructure's."""
    assert judge_one(error, False) == kind
    assert judge_one(error, True) == "preempted"


def test_text_of_a_traceback():
    """A start-up message counts only as the exception's own, and only where there are accelerators."""
    quoted = raised(ValueError("bad argument"))
    assert "No accelerator found" in str(quoted)
    assert judge_one(quoted, False) == "failed"
    assert judge_one(raised(RuntimeError(STARTUP_FAILURES[0])), False, accelerators=False) == "failed"


ERRORS = {
    "failed": raised(ValueError("collateral")),
    "preempted": NodeDiedError("x"),
    "error": ObjectLostError("0" * 56, b"", ""),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(ERRORS)), st.integers(0, 1)), min_size=1),
    st.sets(st.sampled_from(["n0", "n1"])),
)
def test_a_loss_explains_the_rest(kinds, gone):
    """A lost host outweighs the errors of the others, in any order; then comes the function, then the system."""
    errors = [HostError(SLICE, worker, ERRORS[kind]) for kind, worker in kinds]
    status, avoided = judge(INFO, errors, gone)
    lost = any(kind == "preempted" or SLICE.node_ids[worker] in gone for kind, worker in kinds)
    user = any(kind == "failed" for kind, _ in kinds)
    assert status.info.state == ("preempted" if lost else "failed" if user else "error")
    assert type(status) is {"preempted": JobPreempted, "failed": JobFailed, "error": JobError}[status.info.state]
    blamed = {SLICE.node_ids[worker] for kind, worker in kinds if kind == "preempted"}
    assert avoided.keys() == blamed - gone


def test_quarantine():
    """A host is not used for a while if its accelerators did not start, if it is silent, or if a task reports its death
    before Ray does. A host that is gone, or that only lost its placement group, is not quarantined."""
    stuck = HostError(SLICE, 1, raised(RuntimeError("Couldn't open iommu group /dev/vfio/1")))
    other = HostError(SLICE, 0, raised(ValueError("no peer")))
    assert judge(INFO, [other, stuck], set())[1] == {"n1": stuck.summary}
    assert judge(INFO, [other, stuck], {"n1"})[1] == {}
    for error in (NodeSilentError("x"), NodeDiedError("x")):
        assert judge(INFO, [HostError(SLICE, 0, error)], set())[1].keys() == {"n0"}
    assert judge(INFO, [HostError(SLICE, 0, TaskPlacementGroupRemoved())], set())[1] == {}


def test_a_failure_to_start_of_several_hosts():
    """A failure to start that two hosts show, in one attempt or in two, or that one shows again, is the function's."""

    def failed(worker, text):
        return HostError(SLICE, worker, raised(RuntimeError(f"TPU initialization failed: {text}\nmore")))

    first, again, other = failed(0, "no libtpu"), failed(1, "no libtpu"), failed(1, "no chip")
    for attempts in ([[first], [again]], [[first], [first]], [[first, again]], [[first], [other, again]]):
        failures = StartFailures()
        for errors in attempts[:-1]:
            assert failures.add(errors, (), 1.0) == frozenset()
        shared = failures.add(attempts[-1], (), 1.0)
        assert shared == {"RuntimeError: TPU initialization failed: no libtpu"}
        status, avoided = judge(INFO, [again], (), shared=shared)
        assert (status.info.state, avoided) == ("failed", {})
        assert judge(INFO, [other], (), shared=shared)[1] == {"n1": other.summary}


def test_a_failure_to_start_of_one_host():
    """Failures with another text or type, on hosts that are gone, or before the function started, are a host's."""
    first = HostError(SLICE, 0, raised(RuntimeError("TPU initialization failed")))
    again = HostError(SLICE, 1, raised(RuntimeError("TPU initialization failed")))
    for others, gone, ran_s in (
        ([HostError(SLICE, 1, raised(RuntimeError("TPU initialization failed: no chip")))], (), 1.0),
        ([HostError(SLICE, 1, raised(OSError("TPU initialization failed")))], (), 1.0),
        ([again], {"n1"}, 1.0),
    ):
        failures = StartFailures()
        failures.add([first], (), 1.0)
        assert failures.add(others, gone, ran_s) == frozenset()
    # An attempt that succeeded, or that ran for long, had its accelerators.
    for errors, ran_s in (([], 1.0), ([HostError(SLICE, 0, NodeDiedError("x"))], 1000.0)):
        failures = StartFailures()
        failures.add([first], (), 1.0)
        failures.add(errors, (), ran_s)
        assert failures.add([again], (), 1.0) == frozenset()
    failures = StartFailures()
    failures.add([first], (), 1.0)
    failures.add([HostError(SLICE, 0, NodeDiedError("x"))], (), 1.0)
    assert failures.add([again], (), 1.0) == {first.summary}


def test_statuses():
    """Each verdict gives an outcome with the error for the caller: the function's own exception, with its type."""
    own = ValueError("mine")
    failed, _ = judge(INFO, [HostError(SLICE, 0, raised(own))], set())
    assert isinstance(failed, JobFailed)
    assert failed.error is own
    assert isinstance(failed.error.__cause__, RayTaskError)
    preempted, _ = judge(INFO, [HostError(SLICE, 1, NodeDiedError("x"))], set())
    assert isinstance(preempted, JobPreempted)
    assert isinstance(preempted.error, SliceLostError)
    assert preempted.error.slices == ("a",)
    assert "worker 1 of a (10.0.0.2): NodeDiedError" in str(preempted.error)
    assert isinstance(judge(INFO, [HostError(SLICE, 0, ERRORS["error"])], set())[0], JobError)


def test_handle_ray_error():
    """`handle_ray_error` gives the same outcomes without a host."""
    info = JobInfo("train")
    own = KeyError("x")
    assert handle_ray_error(info, raised(own)) == JobFailed(info, own)
    assert isinstance(handle_ray_error(info, NodeDiedError("x")), JobPreempted)
    assert isinstance(handle_ray_error(info, WorkerCrashedError()), JobFailed)
    assert isinstance(handle_ray_error(info, WorkerCrashedError(), node_gone=True), JobPreempted)
    assert isinstance(handle_ray_error(info, ray.exceptions.RaySystemError("x")), JobError)
