# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run, and whose failure it was: the function's, the infrastructure's or the system's. Pure.

The verdict depends on exception types and on which nodes are gone, never on a traceback. Only an accelerator that does
not start is recognized by its text, and only in the exception's own message, because it has no exception type.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray.exceptions
from ray.exceptions import RayError, RayTaskError

from ._slices import SliceInfo
from .exceptions import SliceLostError

State = Literal["running", "succeeded", "preempted", "failed", "error"]
_Verdict = Literal["preempted", "not started", "failed", "error"]


@dataclass(frozen=True)
class JobInfo:
    """The run: the name of its function, its state, the type and the slices, the number of the attempt and its seconds.

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
    """Base of the four outcomes; `info` is the run."""

    info: JobInfo


@dataclass(frozen=True)
class JobSucceeded(JobStatus):
    """The function returned on every host: `result` is one list in the order of the hosts, or one list per slice."""

    result: Any = None


@dataclass(frozen=True)
class JobPreempted(JobStatus):
    """Hosts were lost, or could not start their accelerators: `error` is a `SliceLostError`."""

    error: BaseException


@dataclass(frozen=True)
class JobFailed(JobStatus):
    """The function failed, or its process died on a host that is alive: `error` is its exception, or Ray's."""

    error: BaseException


@dataclass(frozen=True)
class JobError(JobStatus):
    """Ray or the system failed, and neither the function nor the loss of a host explains `error`, Ray's exception."""

    error: BaseException


class NodeLostError(Exception):
    """Ray has declared the node of a task dead."""


# The messages of libtpu and JAX when a chip is missing or another process holds it.
STARTUP_FAILURES = (
    "No accelerator found",
    "Couldn't open iommu group",
    "TPU initialization failed",
    "Failed to initialize TPU system",
    "The TPU is already in use",
    "libtpu.so already in use",
)
_NODE_DEAD = (NodeLostError, ray.exceptions.NodeDiedError)
_NODE_GONE = (
    ray.exceptions.ActorPlacementGroupRemoved,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.TaskPlacementGroupRemoved,
    ray.exceptions.TaskUnschedulableError,
)
# The process is gone and the node is not, so the function caused it.
_CRASHED = (
    ray.exceptions.ActorDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.WorkerCrashedError,
)


@dataclass(frozen=True)
class HostError:
    """An error on a host, as Ray raises it."""

    slice: SliceInfo
    worker: int
    error: BaseException

    @property
    def node_id(self) -> str:
        return self.slice.node_ids[self.worker]

    def __str__(self) -> str:
        raised = as_raised(self.error)
        first_line = " ".join(str(raised).split("\n")[0].split())
        host = f"worker {self.worker} of {self.slice.slice_name} ({self.slice.node_ips[self.worker]})"
        return f"{host}: {type(raised).__name__}: {first_line}"


def judge(
    info: JobInfo, errors: Sequence[HostError], gone: Collection[str], *, accelerators: bool = True
) -> tuple[JobStatus, frozenset[str]]:
    """Return the outcome of a run, and the nodes that tasks have reported dead, perhaps before Ray's head does.

    A lost host explains the errors of the other hosts, and so does an accelerator that did not start. `gone` are the
    nodes that are dead or draining, and only hosts with `accelerators` can fail to start them.
    """
    verdicts = [judge_one(host.error, host.node_id in gone, accelerators=accelerators) for host in errors]
    order: tuple[_Verdict, ...] = ("preempted", "not started", "failed", "error")
    verdict = next(state for state in order if state in verdicts)
    decisive = [host for host, state in zip(errors, verdicts, strict=True) if state == verdict]
    lost = tuple(dict.fromkeys(host.slice.slice_name for host in decisive))
    info = replace(info, state="preempted" if verdict == "not started" else verdict)
    status = _make_status(verdict, info, decisive[0].error, lost, "; ".join(map(str, decisive)))
    return status, frozenset(host.node_id for host in errors if isinstance(as_raised(host.error), _NODE_DEAD))


def judge_one(error: BaseException, node_gone: bool, *, accelerators: bool = True) -> _Verdict:
    """Return the verdict on the error of one host. The host is dead or draining if `node_gone`."""
    if node_gone or isinstance(error, NodeLostError):
        return "preempted"
    raised = as_raised(error)
    if isinstance(raised, ray.exceptions.RayActorError) and raised.preempted:
        return "preempted"
    # An exception of the function may derive from any class, even from Ray's, so who raised it is decided first.
    if isinstance(error, (RayTaskError, ray.exceptions.UnserializableException)) or not isinstance(error, RayError):
        return "not started" if accelerators and failed_start(error) else "failed"
    if isinstance(error, _NODE_GONE):
        return "preempted"
    return "failed" if isinstance(error, _CRASHED) else "error"


def _make_status(
    verdict: _Verdict, info: JobInfo, error: BaseException, lost: tuple[str, ...], reason: str
) -> JobStatus:
    if verdict in ("failed", "error"):
        return JobFailed(info, as_raised(error)) if verdict == "failed" else JobError(info, error)
    loss = SliceLostError(lost, reason)
    loss.__cause__ = error
    return JobPreempted(info, loss)


def failed_start(error: BaseException) -> BaseException | None:
    """Return the exception of a function whose accelerator did not start; None for any other error."""
    raised = as_raised(error)
    has_text = not isinstance(raised, RayError) and any(text in str(raised) for text in STARTUP_FAILURES)
    return raised if has_text else None


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
    names = tuple(place.slice_name for place in job_info.slices)
    return _make_status(judge_one(e, node_gone), job_info, e, names, str(e))
