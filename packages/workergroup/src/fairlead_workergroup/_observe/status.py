# SPDX-License-Identifier: Apache-2.0
"""The state of workers as values: status, resource usage, stuck workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..exceptions import format_coords

State = Literal["starting", "idle", "busy", "stuck", "dead", "restarting", "unknown"]


@dataclass(frozen=True)
class WorkerStatus:
    """The state and current method of one worker.

    Attributes:
        rank: its number in the group.
        name: its name, as in `worker_metadata`.
        coords: its coordinates, by axis.
        state: "starting" (in its constructor), "idle", "busy", "stuck" (busy or stopped, without progress for long),
            "dead", "restarting", or "unknown" (its node is alive but did not answer, or its record could not be read).
        node_id: Ray's id of its node.
        pid: its process there.
        method: the method that it runs; None if it runs none, or if that is unknown.
        running_s: seconds since that method started; 0.0 without a method.
        since_progress_s: seconds since it started or ended a method, yielded an item or called `report_progress`.
        step: the last step it reported; None if it has not reported one.
        message: the last message it reported.
        calls: how many method calls it has started.
        incarnation: how often its rank was started before.
        restarts: how many of these starts were restarts after a loss.
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


@dataclass(frozen=True)
class WorkerUsage:
    """The resources that one worker's process uses.

    Attributes:
        rank: its number in the group.
        cpu_percent: CPU time since the last request, or since the process started, in percent of one CPU.
        rss_bytes: its resident memory.
        gpu_memory_bytes: the memory it holds on the GPUs of its node; None without nvidia-ml-py or a GPU there.
        num_threads: the number of its threads.
    """

    rank: int
    cpu_percent: float
    rss_bytes: int
    gpu_memory_bytes: int | None
    num_threads: int


@dataclass(frozen=True)
class StuckWorker:
    """A worker that is alive and makes no progress.

    Attributes:
        rank: its number in the group.
        coords: its coordinates, by axis.
        node_id: Ray's id of its node.
        pid: its process there.
        method: the method that it runs; None if it was stopped while it was idle.
        running_s: seconds since that method started.
        since_progress_s: seconds since its last progress.
        stacks: the Python stacks of all its threads, innermost frame first, as faulthandler writes them; empty if
            they were not requested or are not available.
        where: the innermost Python frame of the thread that runs the method, `file:line in function`; empty without
            stacks. If the worker hangs in native code, that frame called it.
        note: further facts: who else waits there and which rank does not, or why there are no stacks.

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

    def __str__(self) -> str:
        doing = f"in {self.method!r} for {self.running_s:.0f} s" if self.method else "idle"
        return (
            f"rank {self.rank}{format_coords(self.coords)} on node {self.node_id[:8]}, pid {self.pid}: {doing}, "
            f"no progress for {self.since_progress_s:.0f} s"
            + (f", at {self.where}" if self.where else "")
            + (f"; {self.note}" if self.note else "")
        )


def state_of(dead: bool, row: Mapping[str, Any]) -> State:
    """Return the state of a worker from what `look` says of it; an empty row is one that is not known."""
    if dead:
        return "dead"
    if "method" not in row:
        return "unknown"
    if row["stuck"]:
        return "stuck"
    if row["method"] == "__init__":
        return "starting"
    return "busy" if row["method"] else "idle"
