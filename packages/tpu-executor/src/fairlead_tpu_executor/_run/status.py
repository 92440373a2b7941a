# SPDX-License-Identifier: Apache-2.0
"""What became of a run: values."""

from dataclasses import dataclass, field
from typing import Any, Literal

from .._accelerators.slices import SliceInfo

__all__ = ["JobError", "JobFailed", "JobInfo", "JobPreempted", "JobStatus", "JobSucceeded"]

State = Literal["running", "succeeded", "preempted", "failed", "error"]


@dataclass(frozen=True)
class JobInfo:
    """What was run.

    Attributes:
        name: of the function.
        state: what became of it.
        kind: type of the slices, such as "v4-16".
        slices: which slices.
        attempt: number of the run, from 1.
        seconds: how long it took.

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
        info: what was run.
    """

    info: JobInfo


@dataclass(frozen=True)
class JobSucceeded(JobStatus):
    """It returned on every host.

    Attributes:
        result: what it returned, in the order of the hosts: one list, or with `flatten=False` one per slice.
    """

    result: Any = field(default=None)


@dataclass(frozen=True)
class JobPreempted(JobStatus):
    """Hosts were lost, or could not start their accelerators.

    Attributes:
        error: a `SliceLostError`.
    """

    error: BaseException


@dataclass(frozen=True)
class JobFailed(JobStatus):
    """The function failed, or its process died on a host that lives.

    Attributes:
        error: what the function raised; Ray's error if its process died.
    """

    error: BaseException


@dataclass(frozen=True)
class JobError(JobStatus):
    """Ray or the system failed, and neither the function nor the loss of a host explains it.

    Attributes:
        error: what Ray raised.
    """

    error: BaseException
