# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run, as frozen values."""

from dataclasses import dataclass
from typing import Any, Literal

from .._accelerators.slices import SliceInfo

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
