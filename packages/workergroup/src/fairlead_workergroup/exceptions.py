# SPDX-License-Identifier: Apache-2.0
"""The errors of a group of workers, one class for each situation.

A user's own exception is not among them: it reaches the caller with its own type.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fairlead_placement.extension import ErrorWithFields, format_coords

# A message about thousands of workers has to stay readable.
MOST_SHOWN = 16
FailureKind = Literal[
    "killed",
    "exited",
    "node-lost",
    "out-of-memory",
    "preempted",
    "shut-down",
    "start-failed",
    "cancelled",
    "resize-failed",
    "left",
]
# What to do about the loss of workers, by the kind of the first loss.
STATE = "New workers have the state of their constructor, and of the method that `Restart(method=...)` names."
_AGAIN = "`restart_failed_workers()` starts them again"
_ELSEWHERE = f"{_AGAIN} on other nodes, if the cluster has room there. {STATE}"
REMEDIES: Mapping[FailureKind, str] = {
    "killed": f"Look at the logs of these workers. {_AGAIN}. {STATE}",
    "exited": "A method, or code that it calls, has ended the process: look at the logs of these workers. "
    f"{_AGAIN}. {STATE}",
    "node-lost": _ELSEWHERE,
    "out-of-memory": f"Let the workers use less memory, or raise the limit. {_AGAIN}. {STATE}",
    "preempted": _ELSEWHERE,
    "shut-down": "Their group, their cluster or the process that made them has ended, and they with it. Reserve the "
    "cluster again, and create a new group on it.",
}


class WorkerGroupError(ErrorWithFields):
    """Base of all errors that this package raises after it has launched something."""


@dataclass(frozen=True)
class WorkerFailure:
    """The loss of one worker.

    Attributes:
        rank: its number in the group.
        kind: "killed", "exited" (by itself, as after `sys.exit`), "node-lost", "out-of-memory", "preempted",
            "shut-down" (its group, its cluster or its driver has ended), "start-failed", "cancelled", "resize-failed"
            (it did not take part in a resize), or "left" (a resize has removed its rank).
        coords: its coordinates, by axis.
        node_id: Ray's id of the node it ran on; empty if it never ran.
        pid: its process there; 0 if it never ran.
        cause: the reason that Ray reported.
        exit_code: the status with which the process exited, as after `sys.exit(3)`; None if it did not exit by itself,
            or if that is unknown.
        signal: the number of the signal that ended the process; None if none did, or if that is unknown. Ray reports
            SIGTERM only: it sees SIGKILL, SIGSEGV and `os._exit` as a closed connection.
        log: the path of the worker's log file on its node, with what it wrote to stderr; the file with the ending
            `.out` beside it has stdout. Empty if it is unknown.

    >>> print(WorkerFailure(3, "exited", {"dp": 1}, cause="it died", exit_code=3, log="/tmp/worker-3.err"))
    rank 3 (dp=1): exited, exit code 3: it died
        log: /tmp/worker-3.err
    """

    rank: int
    kind: FailureKind
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)
    node_id: str = ""
    pid: int = 0
    cause: str = ""
    exit_code: int | None = None
    signal: int | None = None
    log: str = ""

    def __str__(self) -> str:
        where = f" on node {self.node_id[:8]}, pid {self.pid}" if self.node_id else ""
        ended = "" if self.exit_code is None else f", exit code {self.exit_code}"
        if self.signal is not None:
            ended = f", {signal.Signals(self.signal).name}"
        log = f"\n    log: {self.log}" if self.log else ""
        return f"rank {self.rank}{format_coords(self.coords)}{where}: {self.kind}{ended}: {self.cause}{log}"


@dataclass(eq=False, repr=False)
class WorkerFailureError(WorkerGroupError):
    """Workers were lost: their process, their node, or their group is gone.

    Attributes:
        failures: one `WorkerFailure` for each worker that is known to be lost.
        remedy: what to do about it; empty for the usual remedy.
    """

    failures: tuple[WorkerFailure, ...]
    remedy: str = field(default_factory=str)

    def __str__(self) -> str:
        lost = format_lines(self.failures)
        kind = self.failures[0].kind if self.failures else "killed"
        remedy = self.remedy or REMEDIES.get(kind, REMEDIES["killed"])
        return f"{len(self.failures)} worker(s) lost:{lost}\n{remedy}"


@dataclass(eq=False, repr=False)
class StaleGroupError(WorkerGroupError):
    """A view, or a call that waited to be sent or came from a handle, belongs to an epoch of the group that has ended.

    Attributes:
        reason: what has changed.
        epoch: the epoch in which it changed.
        ran: the ranks that have run a call of a handle, or may have, although others refused it.
        refused: the ranks that have not run it, because they are in another epoch.
    """

    reason: str
    epoch: int
    ran: tuple[int, ...] = field(default_factory=tuple)
    refused: tuple[int, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False, repr=False)
class ResizeTimeoutError(WorkerGroupError, TimeoutError):
    """A resize or a restart could not begin in time. Nothing has changed.

    Attributes:
        what: the change that was requested.
        waited_s: the seconds that it has waited.
        late: the workers that had not finished their calls.
        reason: what it waited for.
    """

    what: str
    waited_s: float
    late: "tuple[LateWorker, ...]" = field(default_factory=tuple)
    reason: str = field(default_factory=str)

    def __str__(self) -> str:
        return f"{self.what} had not begun after {self.waited_s:.1f} s, and nothing has changed. {self.reason}" + (
            format_lines(self.late)
        )


@dataclass(frozen=True)
class LateWorker:
    """A worker that had not finished its part of a call in time.

    Attributes:
        rank: its number in the group.
        coords: its coordinates, by axis.
        node_id: Ray's id of the node it runs on.
        pid: its process there.
        method: the method that it runs now, which is the called method or an earlier one; None when the worker is idle
            or its record cannot be read.
        running_s: the seconds since that method started.

    >>> print(LateWorker(3, {"dp": 1}, "abcdef0123", 77, "load", 1.25))
    rank 3 (dp=1) on node abcdef01, pid 77: in 'load' for 1.2 s
    """

    rank: int
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)
    node_id: str = ""
    pid: int = 0
    method: str | None = None
    running_s: float = 0.0

    def __str__(self) -> str:
        doing = f": in {self.method!r} for {self.running_s:.1f} s" if self.method else ""
        return f"rank {self.rank}{format_coords(self.coords)} on node {self.node_id[:8]}, pid {self.pid}{doing}"


@dataclass(eq=False, repr=False)
class CallTimeoutError(WorkerGroupError, TimeoutError):
    """Workers had not finished a call by its deadline, or in the time that its caller wanted to wait.

    The call continues and nothing is lost: you can ask for its result again. You do not get this error when a worker is
    dead. A call that waits for a restart past its deadline is not sent, and has no late workers.

    Attributes:
        method: the name of the called method.
        waited_s: the seconds since the call was made.
        called: the number of called workers.
        late: the workers that have not finished.
        reason: why the call was not sent; empty if it was.
    """

    method: str
    waited_s: float
    called: int
    late: tuple[LateWorker, ...]
    reason: str = field(default_factory=str)

    def __str__(self) -> str:
        if self.reason:
            return f"{self.method!r} was not sent to its {self.called} workers in {self.waited_s:.1f} s. {self.reason}"
        return (
            f"{len(self.late)} of {self.called} workers have not finished {self.method!r}, "
            f"called {self.waited_s:.1f} s ago:{format_lines(self.late)}\n"
            "The call continues: ask for its result again, cancel it, or end what never returns: `restart(ranks)`."
        )


@dataclass(eq=False, repr=False)
class CallCancelledError(WorkerGroupError):
    """A call was cancelled before all of its workers had finished it.

    Attributes:
        method: the name of the called method.
        ranks: the ranks that had not finished.
    """

    method: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"the call of {self.method!r} was cancelled before rank(s) {format_ranks(self.ranks)} finished it"


@dataclass(eq=False, repr=False)
class WorkerStartError(WorkerGroupError):
    """A group did not start. All its workers have been ended, and everything that it held has been released.

    Attributes:
        reason: what failed, and where.
        rank: the rank of the first worker that failed; -1 if the start failed before there were workers, or by the
            deadline.
        coords: the coordinates of that worker.
        node_id: the node of that worker.
        remote_traceback: the traceback in the worker, as text; empty if there is none.
        others: the states of the other workers.
    """

    reason: str
    rank: int = field(default_factory=lambda: -1)
    coords: dict[str, int] = field(default_factory=dict)
    node_id: str = field(default_factory=str)
    remote_traceback: str = field(default_factory=str)
    others: str = field(default_factory=str)

    def __str__(self) -> str:
        parts = [self.reason]
        if self.rank >= 0:
            parts[0] = f"rank {self.rank}{format_coords(self.coords)} on node {self.node_id[:8]}: {self.reason}"
        if self.others:
            parts.append(self.others)
        if self.remote_traceback:
            parts.append(self.remote_traceback.rstrip())
        return "\n".join(parts)


@dataclass(eq=False, repr=False)
class RemoteError(WorkerGroupError):
    """A worker raised an exception that cannot be raised in the driver.

    The driver cannot import its class or cannot copy it.

    Attributes:
        type_name: the full name of the exception's class.
        message: its text.
        remote_traceback: the traceback in the worker, as text.
        rank: the rank of the worker; -1 if it is not known.
    """

    type_name: str
    message: str
    remote_traceback: str = field(default_factory=str)
    rank: int = field(default_factory=lambda: -1)

    def __str__(self) -> str:
        return f"rank {self.rank} raised {self.type_name}: {self.message}\n{self.remote_traceback}".rstrip()


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in a list for people, or the first `MOST_SHOWN` of them."""
    more = f" and {len(ranks) - MOST_SHOWN} others" if len(ranks) > MOST_SHOWN else ""
    return ", ".join(map(str, ranks[:MOST_SHOWN])) + more


def format_lines(workers: Sequence[object]) -> str:
    """Return a line for each worker, or for the first `MOST_SHOWN` workers if there are more."""
    shown = "".join(f"\n  {worker}" for worker in workers[:MOST_SHOWN])
    return shown + (f"\n  and {len(workers) - MOST_SHOWN} others" if len(workers) > MOST_SHOWN else "")
