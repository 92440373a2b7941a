# SPDX-License-Identifier: Apache-2.0
"""The outcome of an attempt, whose failure it was, and whether the attempt is repeated. Pure.

The verdict depends on exception types and on which nodes are gone, never on a traceback. Only an accelerator that does
not start is recognized by its text, and only in the exception's own message, because it has no exception type.
"""

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray.exceptions
from ray.exceptions import RayError, RayTaskError

from ._slices import SliceInfo
from .exceptions import PreemptionLimitError, SliceLostError

logger = logging.getLogger(__name__)

State = Literal["running", "succeeded", "preempted", "failed", "error"]
_Verdict = Literal["preempted", "not started", "failed", "error"]


@dataclass(frozen=True)
class JobInfo:
    """The run: its function, its state, the type and the slices, the number of the attempt, and its seconds."""

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


# The messages of libtpu and JAX when a chip is missing or another process holds it.
STARTUP_FAILURES = (
    "No accelerator found",
    "Couldn't open iommu group",
    "TPU initialization failed",
    "Failed to initialize TPU system",
    "The TPU is already in use",
    "libtpu.so already in use",
)
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

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 60.0


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
    def is_of_dead_node(self) -> bool:
        """Whether the error says that the node is dead, perhaps before Ray's head does."""
        return isinstance(as_raised(self.error), ray.exceptions.NodeDiedError)

    def __str__(self) -> str:
        raised = as_raised(self.error)
        first_line = " ".join(str(raised).split("\n")[0].split())
        host = f"worker {self.worker} of {self.slice.slice_name} ({self.slice.node_ips[self.worker]})"
        return f"{host}: {type(raised).__name__}: {first_line}"


def judge(info: JobInfo, errors: Sequence[HostError], gone: Collection[str]) -> JobStatus:
    """Return the outcome of a run with errors. `gone` are the nodes that are dead or draining.

    A lost host explains the errors of the other hosts, and so does an accelerator that did not start.
    """
    verdicts = [judge_one(host.error, host.node_id in gone) for host in errors]
    order: tuple[_Verdict, ...] = ("preempted", "not started", "failed", "error")
    verdict = next(state for state in order if state in verdicts)
    decisive = [host for host, state in zip(errors, verdicts, strict=True) if state == verdict]
    lost = tuple(dict.fromkeys(host.slice.slice_name for host in decisive))
    info = replace(info, state="preempted" if verdict == "not started" else verdict)
    return _make_status(verdict, info, decisive[0].error, lost, "; ".join(map(str, decisive)))


def judge_one(error: BaseException, node_gone: bool) -> _Verdict:
    """Return the verdict on the error of one host. The host is dead or draining if `node_gone`."""
    if node_gone:
        return "preempted"
    raised = as_raised(error)
    if isinstance(raised, ray.exceptions.RayActorError) and raised.preempted:
        return "preempted"
    # An exception of the function may derive from any class, even from Ray's, so who raised it is decided first.
    if isinstance(error, (RayTaskError, ray.exceptions.UnserializableException)) or not isinstance(error, RayError):
        return "not started" if failed_start(error) else "failed"
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


def failed_start(error: BaseException | None) -> bool:
    """Return whether this is an exception of a function whose accelerator did not start."""
    raised = error and as_raised(error)
    return not isinstance(raised, RayError) and any(text in str(raised) for text in STARTUP_FAILURES)


def as_raised(error: BaseException) -> BaseException:
    """Return the function's own exception, with Ray's as its cause; any other error as it is."""
    cause = getattr(error, "cause", None)
    if not isinstance(error, RayTaskError) or not isinstance(cause, BaseException) or type(cause) is RayError:
        return error
    cause.__cause__ = error
    return cause


def handle_ray_error(job_info: JobInfo, e: BaseException) -> JobStatus:
    """Return the outcome of the run `job_info` that `e` stands for, the exception that `ray.get` raised."""
    names = tuple(place.slice_name for place in job_info.slices)
    return _make_status(judge_one(e, node_gone=False), job_info, e, names, str(e))


def retry(
    attempt: Callable[[int], JobStatus],
    *,
    max_failures: int,
    max_preemptions: int,
    sleep: Callable[[float], None] = time.sleep,
) -> JobSucceeded:
    """Repeat attempts, numbered from 1, until one succeeds or a budget is spent; a maximum of n allows n + 1.

    An accelerator that did not start uses the budget of failures: it may never start, and a budget of preemptions has
    no end in practice.
    """
    number = failures = preemptions = 0
    while True:
        number += 1
        status = attempt(number)
        if isinstance(status, JobSucceeded):
            return status
        assert isinstance(status, JobPreempted | JobFailed | JobError)
        error, name = status.error, status.info.name
        is_loss = isinstance(status, JobPreempted) and not failed_start(error.__cause__)
        failures, preemptions = failures + (not is_loss), preemptions + is_loss
        if preemptions > max_preemptions:
            raise PreemptionLimitError(name, preemptions, max_preemptions, str(error)) from error
        if failures > max_failures:
            own = as_raised(error.__cause__) if isinstance(status, JobPreempted) and error.__cause__ else error
            own.add_note(
                f"{name} was attempted {number} time(s): {failures} failed (max_retries_failure={max_failures}), "
                f"{preemptions} were preempted."
            )
            raise own
        # With the jitter, jobs that failed together do not start again together. The exponent cannot overflow.
        wait = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(number - 1, 60)) * random.uniform(0.5, 1.0)
        kind = "preemption" if is_loss else "failure"
        logger.warning("Attempt %d of %s ended in a %s. It is repeated in %.1f s. %s", number, name, kind, wait, error)
        sleep(wait)
