# SPDX-License-Identifier: Apache-2.0
"""What is told of workers that are looked at from outside, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .._display import record_html

__all__ = ["State", "StuckWorker", "WorkerEvent", "WorkerStatus", "WorkerUsage"]

State = Literal["starting", "idle", "busy", "stuck", "dead", "restarting", "unknown"]


@dataclass(frozen=True)
class WorkerStatus:
    """What one worker is doing.

    Attributes:
        rank: its number in the group.
        name: its name, as in `worker_metadata`.
        coords: its coordinates, by axis.
        state: "starting" (in its constructor), "idle", "busy", "stuck" (busy or stopped, without progress for long),
            "dead", "restarting", or "unknown": its node is alive and did not answer, or its record could not be read.
        node_id: Ray's id of its node.
        pid: its process there.
        method: what it is running; None when it is not running anything, or nobody knows.
        running_s: seconds since it started that; 0.0 without.
        since_progress_s: seconds since it started or ended a method, yielded an item or called `report_progress`.
        step: the last step it reported; None if it has not.
        message: the last message it reported.
        calls: how many method calls it has started.
        incarnation: how often its rank has been started before.
        restarts: how often of these because it was lost.
    """

    rank: int
    name: str
    coords: Mapping[str, int] = field(hash=False)
    state: State
    node_id: str
    pid: int
    method: str | None = None
    running_s: float = 0.0
    since_progress_s: float = 0.0
    step: int | None = None
    message: str = ""
    calls: int = 0
    incarnation: int = 0
    restarts: int = 0

    _repr_html_ = record_html


@dataclass(frozen=True)
class WorkerUsage:
    """What one worker's process uses.

    Attributes:
        rank: its number in the group.
        cpu_percent: CPU time since it was last asked for, at first since the process started, in percent of one CPU.
        rss_bytes: memory it has resident.
        gpu_memory_bytes: what it holds on the GPUs of its node; None without nvidia-ml-py or a GPU there.
        num_threads: its threads.
    """

    rank: int
    cpu_percent: float
    rss_bytes: int
    gpu_memory_bytes: int | None
    num_threads: int

    _repr_html_ = record_html


@dataclass(frozen=True)
class StuckWorker:
    """A worker that lives and does not get on.

    Attributes:
        rank: its number in the group.
        coords: its coordinates, by axis.
        node_id: Ray's id of its node.
        pid: its process there.
        method: what it is running; None if it was stopped while it was idle.
        running_s: seconds since it started that.
        since_progress_s: seconds since its last progress.
        stacks: the Python stacks of all its threads, innermost frame first, as faulthandler writes them; empty if
            they were not asked for or could not be had.
        where: the innermost Python frame of the thread that runs the method, `file:line in function`; empty without
            stacks. When the worker hangs in native code, that is the frame that called it.
        note: what else is known: who else waits there and which rank does not, or why there are no stacks.

    >>> print(StuckWorker(1, {"dp": 0}, "abcdef0123", 77, "step", 62.0, 61.0, where="train.py:3 in step"))
    rank 1 (dp=0) on node abcdef01, pid 77: in 'step' for 62 s, no progress for 61 s, at train.py:3 in step
    """

    rank: int
    coords: Mapping[str, int] = field(hash=False)
    node_id: str
    pid: int
    method: str | None
    running_s: float
    since_progress_s: float
    stacks: str = ""
    where: str = ""
    note: str = ""

    _repr_html_ = record_html

    def __str__(self) -> str:
        coords = f" ({', '.join(f'{axis}={at}' for axis, at in self.coords.items())})" if self.coords else ""
        doing = f"in {self.method!r} for {self.running_s:.0f} s" if self.method else "idle"
        return (
            f"rank {self.rank}{coords} on node {self.node_id[:8]}, pid {self.pid}: {doing}, "
            f"no progress for {self.since_progress_s:.0f} s"
            + (f", at {self.where}" if self.where else "")
            + (f"; {self.note}" if self.note else "")
        )


@dataclass(frozen=True)
class WorkerEvent:
    """Something that happened to one worker.

    Attributes:
        kind: "worker-started", "call-slow", "worker-stuck", "worker-dead" or "worker-restarted".
        rank: its number in the group.
        coords: its coordinates, by axis.
        node_id: Ray's id of its node.
        pid: its process there.
        incarnation: how often its rank had been started before.
        method: what it was running; None without.
        message: the event as a line for people.
        time: when it was seen, in seconds since the epoch by this machine's clock.
        stuck: of "worker-stuck": what is known, with stacks.
    """

    kind: Literal["worker-started", "call-slow", "worker-stuck", "worker-dead", "worker-restarted"]
    rank: int
    coords: Mapping[str, int] = field(hash=False)
    node_id: str
    pid: int
    incarnation: int
    method: str | None
    message: str
    time: float
    stuck: StuckWorker | None = None

    _repr_html_ = record_html
