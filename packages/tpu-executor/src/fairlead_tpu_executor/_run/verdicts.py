# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run, and whose failure it was: the function's, the infrastructure's or the system's. Pure.

The verdict depends on exception types and on which nodes are gone, never on a traceback. Only an accelerator that does
not start is recognized by its text, and only in the exception's own message, because it has no exception type.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ray.exceptions
from ray.exceptions import RayError, RayTaskError

from .._accelerators.slices import SliceInfo
from ..exceptions import SliceLostError

State = Literal["running", "succeeded", "preempted", "failed", "error"]


@dataclass(frozen=True)
class JobInfo:
    """The run.

    Attributes:
        name: the name of the function.
        state: the state of the run.
        kind: the type of the slices, such as "v4-16".
        slices: the slices.
        attempt: the number of the attempt, from 1.
        seconds: how long the attempt took.

    >>> JobSucceeded(JobInfo("train", "succeeded"), result=[42]).result
    [42]
    """

    name: str
    state: State = "running"
    kind: str = ""
    slices: tuple[SliceInfo, ...] = ()
    attempt: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class JobStatus:
    """Base of the four outcomes.

    Attributes:
        info: the run.
    """

    info: JobInfo


@dataclass(frozen=True)
class JobSucceeded(JobStatus):
    """The function returned on every host.

    Attributes:
        result: the return values in the order of the hosts: one list, or with `flatten=False` one list per slice.
    """

    result: Any = None


@dataclass(frozen=True)
class JobPreempted(JobStatus):
    """Hosts were lost, or could not start their accelerators.

    Attributes:
        error: a `SliceLostError`.
    """

    error: BaseException


@dataclass(frozen=True)
class JobFailed(JobStatus):
    """The function failed, or its process died on a host that is alive.

    Attributes:
        error: the exception of the function; Ray's error if its process died.
    """

    error: BaseException


@dataclass(frozen=True)
class JobError(JobStatus):
    """Ray or the system failed, and neither the function nor the loss of a host explains it.

    Attributes:
        error: Ray's exception.
    """

    error: BaseException


# After so many seconds without a start-up failure the accelerators of an attempt have started.
_STARTED_S = 300.0
# The messages of libtpu and JAX when a chip is missing or another process holds it.
STARTUP_FAILURES = (
    "No accelerator found",
    "Couldn't open iommu group",
    "TPU initialization failed",
    "Failed to initialize TPU system",
    "The TPU is already in use",
    "libtpu.so already in use",
)
_GROUP_GONE = (ray.exceptions.ActorPlacementGroupRemoved, ray.exceptions.TaskPlacementGroupRemoved)
_NODE_GONE = (
    *_GROUP_GONE,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.TaskUnschedulableError,
)
# The process is gone and the node is not, so the function caused it.
_CRASHED = (
    ray.exceptions.ActorDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.WorkerCrashedError,
)


class NodeSilentError(Exception):
    """A node's raylet does not answer; Ray has not declared it dead yet."""


@dataclass(frozen=True)
class HostError:
    """An error on a host, as Ray raises it."""

    slice: SliceInfo
    worker: int
    error: BaseException

    @property
    def node_id(self) -> str:
        return self.slice.node_ids[self.worker]

    @property
    def summary(self) -> str:
        raised = as_raised(self.error)
        first_line = " ".join(str(raised).split("\n")[0].split())
        return f"{type(raised).__name__}: {first_line}"

    def __str__(self) -> str:
        return f"worker {self.worker} of {self.slice.slice_name} ({self.slice.node_ips[self.worker]}): {self.summary}"


@dataclass(frozen=True)
class StartFailures:
    """The hosts on which accelerators failed to start, once per attempt, by the summary of the failure."""

    hosts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, errors: Sequence[HostError], gone: Collection[str], seconds: float) -> frozenset[str]:
        """Record an attempt, and return the failures seen on two hosts, or again on a host after its quarantine."""
        now = {(one.summary, one.node_id) for one in errors if one.node_id not in gone and failed_start(one.error)}
        for failure, node_id in now:
            self.hosts.setdefault(failure, []).append(node_id)
        if not now and (not errors or seconds >= _STARTED_S):
            self.hosts.clear()
        return frozenset(failure for failure, hosts in self.hosts.items() if len(hosts) > 1)


def _make_status(state: State, info: JobInfo, error: BaseException, lost: tuple[str, ...], reason: str) -> JobStatus:
    if state == "failed":
        return JobFailed(info, as_raised(error))
    if state == "error":
        return JobError(info, error)
    loss = SliceLostError(lost, reason)
    loss.__cause__ = error
    return JobPreempted(info, loss)


def judge(
    info: JobInfo,
    errors: Sequence[HostError],
    gone: Collection[str],
    *,
    accelerators: bool = True,
    shared: Collection[str] = (),
) -> tuple[JobStatus, dict[str, str]]:
    """Return the outcome of a run, in which a loss explains the errors of other hosts, and nodes to avoid, with why."""
    states = [
        judge_one(one.error, one.node_id in gone, accelerators=accelerators and one.summary not in shared)
        for one in errors
    ]
    order: tuple[State, ...] = ("preempted", "failed", "error")
    state = next(one for one in order if one in states)
    decided = [error for error, its in zip(errors, states, strict=True) if its == state]
    lost = tuple(dict.fromkeys(one.slice.slice_name for one in decided))
    info = replace(info, state=state)
    status = _make_status(state, info, decided[0].error, lost, "; ".join(map(str, decided)))
    # Ray may report the death of a node for a task, seconds before it reports it for the node.
    blamed = [one for one in decided if state == "preempted" and not isinstance(one.error, _GROUP_GONE)]
    return status, {one.node_id: one.summary for one in blamed if one.node_id not in gone}


def judge_one(error: BaseException, node_gone: bool, *, accelerators: bool = True) -> State:
    """Return the state that the error of one host leads to. The host is dead or draining if `node_gone`."""
    if node_gone or isinstance(error, NodeSilentError):
        return "preempted"
    raised = as_raised(error)
    if isinstance(raised, ray.exceptions.RayActorError) and raised.preempted:
        return "preempted"
    # An exception of the function may derive from any class, also from Ray's, so who raised it is decided first.
    if isinstance(error, (RayTaskError, ray.exceptions.UnserializableException)) or not isinstance(error, RayError):
        return "preempted" if accelerators and failed_start(error) else "failed"
    if isinstance(error, _NODE_GONE):
        return "preempted"
    return "failed" if isinstance(error, _CRASHED) else "error"


def failed_start(error: BaseException) -> BaseException | None:
    """Return the exception of a function whose accelerator did not start; None for any other error."""
    raised = as_raised(error)
    found = not isinstance(raised, RayError) and any(text in str(raised) for text in STARTUP_FAILURES)
    return raised if found else None


def as_raised(error: BaseException) -> BaseException:
    """Return the function's own exception, with Ray's as its cause; any other error as it is."""
    cause = getattr(error, "cause", None)
    if not isinstance(error, RayTaskError) or not isinstance(cause, BaseException) or type(cause) is RayError:
        return error
    cause.__cause__ = error
    return cause


def handle_ray_error(job_info: JobInfo, e: BaseException, *, node_gone: bool = False) -> JobStatus:
    """Return the outcome that an error of Ray stands for.

    Args:
        job_info: the run.
        e: the exception that `ray.get` raised.
        node_gone: whether the node of the task is dead or draining, if that is known.

    >>> from ray.exceptions import WorkerCrashedError
    >>> type(handle_ray_error(JobInfo("train"), WorkerCrashedError())).__name__
    'JobFailed'
    """
    names = tuple(one.slice_name for one in job_info.slices)
    return _make_status(judge_one(e, node_gone), job_info, e, names, str(e))
