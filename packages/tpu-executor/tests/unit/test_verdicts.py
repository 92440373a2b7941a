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
from fairlead_tpu_executor._verdicts import (
    STARTUP_FAILURES,
    HostError,
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
        (TaskPlacementGroupRemoved(), "preempted"),
        (OwnerDiedError("0" * 56, b"", ""), "error"),
        (ObjectLostError("0" * 56, b"", ""), "error"),
        (TaskCancelledError(), "error"),
        *((raised(RuntimeError(f"UNKNOWN: {text} /dev/vfio/0")), "not started") for text in STARTUP_FAILURES),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_one_error(error, kind):
    """On a live node the type of the exception decides; on a node that is gone every error is the infrastructure's."""
    assert judge_one(error, False) == kind
    assert judge_one(error, True) == "preempted"


def test_text_of_a_traceback():
    """A start-up message counts only as the exception's own."""
    quoted = raised(ValueError("bad argument"))
    assert "No accelerator found" in str(quoted)
    assert judge_one(quoted, False) == "failed"


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
    status = judge(INFO, errors, gone)
    lost = any(kind == "preempted" or SLICE.node_ids[worker] in gone for kind, worker in kinds)
    user = any(kind == "failed" for kind, _ in kinds)
    assert status.info.state == ("preempted" if lost else "failed" if user else "error")
    assert type(status) is {"preempted": JobPreempted, "failed": JobFailed, "error": JobError}[status.info.state]
    assert [host.is_of_dead_node for host in errors] == [kind == "preempted" for kind, _ in kinds]


def test_an_accelerator_that_did_not_start():
    """It explains the errors of the other hosts, and a lost host explains it; its exception is the cause."""
    stuck = HostError(SLICE, 1, raised(RuntimeError("Couldn't open iommu group /dev/vfio/1")))
    other = HostError(SLICE, 0, raised(ValueError("no peer")))
    status = judge(INFO, [other, stuck], set())
    assert isinstance(status, JobPreempted)
    assert status.error.__cause__ is stuck.error
    assert judge(INFO, [stuck, other], {"n0"}).error.__cause__ is other.error


def test_statuses():
    """Each verdict gives an outcome with the error for the caller: the function's own exception, with its type."""
    own = ValueError("mine")
    failed = judge(INFO, [HostError(SLICE, 0, raised(own))], set())
    assert isinstance(failed, JobFailed)
    assert failed.error is own
    assert isinstance(failed.error.__cause__, RayTaskError)
    preempted = judge(INFO, [HostError(SLICE, 1, NodeDiedError("x"))], set())
    assert isinstance(preempted, JobPreempted)
    assert isinstance(preempted.error, SliceLostError)
    assert preempted.error.slices == ("a",)
    assert "worker 1 of a (10.0.0.2): NodeDiedError" in str(preempted.error)
    assert isinstance(judge(INFO, [HostError(SLICE, 0, ERRORS["error"])], set()), JobError)


def test_handle_ray_error():
    """`handle_ray_error` gives the same outcomes without a host."""
    info = JobInfo("train")
    own = KeyError("x")
    assert handle_ray_error(info, raised(own)) == JobFailed(info, own)
    assert isinstance(handle_ray_error(info, NodeDiedError("x")), JobPreempted)
    assert isinstance(handle_ray_error(info, WorkerCrashedError()), JobFailed)
    assert isinstance(handle_ray_error(info, ray.exceptions.RaySystemError("x")), JobError)
