# SPDX-License-Identifier: Apache-2.0
"""Whose failure it was: the function's, the infrastructure's or the system's. Pure.

Decided from exception types and from which nodes are gone, never from a traceback. Only what an accelerator says when
it does not start is known by its text, and only by the exception's own message: it has no type of its own.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskCancelledError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
    UnserializableException,
    WorkerCrashedError,
)

from .._accelerators.slices import SliceInfo
from ..exceptions import SliceLostError
from .status import JobError, JobFailed, JobInfo, JobPreempted, JobStatus

__all__ = [
    "HostError",
    "Kind",
    "NodeSilentError",
    "STARTUP_FAILURES",
    "Verdict",
    "as_raised",
    "handle_ray_error",
    "judge",
    "judge_one",
    "process_died",
]

Kind = Literal["user", "infrastructure", "system"]

# What libtpu and JAX say when a chip is not there or is held by somebody else.
STARTUP_FAILURES = (
    "No accelerator found",
    "Couldn't open iommu group",
    "TPU initialization failed",
    "Failed to initialize TPU system",
    "The TPU is already in use",
    "libtpu.so already in use",
)
_GROUP_GONE = (ActorPlacementGroupRemoved, TaskPlacementGroupRemoved)
_NODE_GONE = (*_GROUP_GONE, ActorUnschedulableError, NodeDiedError, TaskUnschedulableError)
# The process is gone, the node is not: what the function did to itself.
_CRASHED = (ActorDiedError, OutOfMemoryError, RuntimeEnvSetupError, WorkerCrashedError)


class NodeSilentError(Exception):
    """A node's raylet does not answer; Ray has not declared it dead yet."""


@dataclass(frozen=True)
class HostError:
    """What went wrong on a host.

    Attributes:
        slice: the slice.
        worker: the host's TPU worker id in it.
        error: what Ray raised.
    """

    slice: SliceInfo
    worker: int
    error: BaseException

    @property
    def node_id(self) -> str:
        """Ray's id of the host."""
        return self.slice.node_ids[self.worker]

    def __str__(self) -> str:
        said = " ".join(str(as_raised(self.error)).split("\n")[0].split())
        return (
            f"worker {self.worker} of {self.slice.slice_name} ({self.slice.node_ips[self.worker]}): "
            f"{type(as_raised(self.error)).__name__}: {said}"
        )


@dataclass(frozen=True)
class Verdict:
    """Whose failure it was, and what shows it.

    Attributes:
        kind: whose.
        errors: those that decided it; the first is the one to show.
        quarantine: ids of nodes not to use for a while: lost although Ray takes them to be alive, or of no use.
    """

    kind: Kind
    errors: tuple[HostError, ...]
    quarantine: frozenset[str] = frozenset()

    def status(self, info: JobInfo) -> JobStatus:
        """The outcome, with the error that a caller is shown."""
        first = self.errors[0].error
        if self.kind == "user":
            return JobFailed(info, as_raised(first))
        if self.kind == "system":
            return JobError(info, first)
        lost = tuple(dict.fromkeys(one.slice.slice_name for one in self.errors))
        error = SliceLostError(lost, "; ".join(map(str, self.errors)))
        error.__cause__ = first
        return JobPreempted(info, error)


def judge(errors: Sequence[HostError], gone: Collection[str], *, accelerators: bool = True) -> Verdict:
    """One verdict for a run: a loss of infrastructure explains what the other hosts raised.

    Args:
        errors: what went wrong, in the order in which it was seen; at least one.
        gone: ids of the nodes that are dead, or about to go.
        accelerators: whether the table of start-up failures applies.
    """
    kinds = [judge_one(one.error, one.node_id in gone, accelerators=accelerators) for one in errors]
    order: tuple[Kind, ...] = ("infrastructure", "user", "system")
    kind = next(one for one in order if one in kinds)
    decided = tuple(error for error, its in zip(errors, kinds, strict=True) if its == kind)
    # Ray may say of a task that its node died seconds before it says so of the node.
    blamed = {one.node_id for one in decided if kind == "infrastructure" and not isinstance(one.error, _GROUP_GONE)}
    quarantine = frozenset(blamed - set(gone))
    return Verdict(kind, decided, quarantine)


def judge_one(error: BaseException, node_gone: bool, *, accelerators: bool = True) -> Kind:
    """Whose failure one host's error is.

    Args:
        error: what Ray raised.
        node_gone: whether the host is dead, or about to go.
        accelerators: whether the table of start-up failures applies.
    """
    if node_gone or isinstance(error, NodeSilentError):
        return "infrastructure"
    raised = as_raised(error)
    if isinstance(raised, RayActorError) and raised.preempted:
        return "infrastructure"
    # An exception of the function may derive from anything, also from Ray's: look at who raised it first.
    if isinstance(error, (RayTaskError, UnserializableException)) or not isinstance(error, RayError):
        return "infrastructure" if accelerators and _did_not_start(error) else "user"
    if isinstance(error, TaskCancelledError):
        return "system"
    if isinstance(error, _NODE_GONE):
        return "infrastructure"
    return "user" if isinstance(error, _CRASHED) else "system"


def _did_not_start(error: BaseException) -> bool:
    """By the exception's own message; that of a RayTaskError without a cause is a traceback."""
    raised = as_raised(error)
    return not isinstance(raised, RayError) and any(text in str(raised) for text in STARTUP_FAILURES)


def as_raised(error: BaseException) -> BaseException:
    """What the function raised itself, with Ray's account of it as the cause; else the error as it is."""
    cause = getattr(error, "cause", None)
    if not isinstance(error, RayTaskError) or not isinstance(cause, BaseException) or type(cause) is RayError:
        return error
    cause.__cause__ = error
    return cause


def process_died(error: BaseException) -> bool:
    """Whether a process ended without an exception of the function's: the first sign of some preemptions, too."""
    return isinstance(error, (ActorDiedError, WorkerCrashedError)) and not isinstance(error, RayTaskError)


def handle_ray_error(job_info: JobInfo, error: BaseException, *, node_gone: bool = False) -> JobStatus:
    """The outcome that an error of Ray means.

    Args:
        job_info: what was run.
        error: what `ray.get` raised.
        node_gone: whether the node it ran on is dead or about to go, if that is known.

    >>> from ray.exceptions import WorkerCrashedError
    >>> type(handle_ray_error(JobInfo("train"), WorkerCrashedError())).__name__
    'JobFailed'
    """
    kind = judge_one(error, node_gone)
    if kind == "user":
        return JobFailed(job_info, as_raised(error))
    if kind == "system":
        return JobError(job_info, error)
    lost = SliceLostError(tuple(one.slice_name for one in job_info.slices), str(error))
    lost.__cause__ = error
    return JobPreempted(job_info, lost)
