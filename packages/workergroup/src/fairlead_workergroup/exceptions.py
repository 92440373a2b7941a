# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a group of workers, one class per situation.

A user's own exception is not among them: it reaches the caller with its own type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["RemoteError", "WorkerFailure", "WorkerFailureError", "WorkerGroupError", "WorkerStartError"]


class WorkerGroupError(Exception):
    """Base of everything this package raises once something has been launched."""


@dataclass(frozen=True)
class WorkerFailure:
    """What is known of one worker that was lost.

    Attributes:
        rank: its number in the group.
        kind: "killed", "node-lost", "out-of-memory", "preempted" or "start-failed".
        coords: its coordinates, by axis.
        node_id: Ray's id of the node it ran on; empty if it never ran.
        pid: its process there; 0 if it never ran.
        cause: what Ray said of it.
    """

    rank: int
    kind: str
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)
    node_id: str = ""
    pid: int = 0
    cause: str = ""

    def __str__(self) -> str:
        where = f" on node {self.node_id[:8]}, pid {self.pid}" if self.node_id else ""
        return f"rank {self.rank}{_at(self.coords)}{where}: {self.kind}: {self.cause}"


class WorkerFailureError(WorkerGroupError):
    """Workers were lost: their process, their node, or the group they belong to is gone.

    Attributes:
        failures: one `WorkerFailure` per lost worker that is known of.
    """

    def __init__(self, failures: tuple[WorkerFailure, ...], remedy: str = "") -> None:
        super().__init__(failures, remedy)
        self.failures = failures
        self.remedy = remedy

    def __str__(self) -> str:
        lost = "\n".join(f"  {failure}" for failure in self.failures)
        remedy = self.remedy or "Look at the logs of these workers; shut the group down and start it again."
        return f"{len(self.failures)} worker(s) lost:\n{lost}\n{remedy}"


class WorkerStartError(WorkerGroupError):
    """A group did not start. Every worker of it has been ended and everything it held given back.

    Attributes:
        reason: what failed, and where.
        rank: of the first worker that failed; -1 if it failed before there were workers, or by the deadline.
        coords: its coordinates.
        node_id: the node it was on.
        remote_traceback: the traceback in the worker, as text; empty if there is none.
        others: what the other workers did.
    """

    def __init__(
        self,
        reason: str,
        rank: int = -1,
        coords: Mapping[str, int] | None = None,
        node_id: str = "",
        remote_traceback: str = "",
        others: str = "",
    ) -> None:
        super().__init__(reason, rank, coords, node_id, remote_traceback, others)
        self.reason = reason
        self.rank = rank
        self.coords = dict(coords or {})
        self.node_id = node_id
        self.remote_traceback = remote_traceback
        self.others = others

    def __str__(self) -> str:
        parts = [self.reason]
        if self.rank >= 0:
            parts[0] = f"rank {self.rank}{_at(self.coords)} on node {self.node_id[:8]}: {self.reason}"
        if self.others:
            parts.append(self.others)
        if self.remote_traceback:
            parts.append(self.remote_traceback.rstrip())
        return "\n".join(parts)


class RemoteError(WorkerGroupError):
    """A worker raised an exception whose class cannot be imported here.

    Attributes:
        type_name: full name of the exception's class.
        message: its text.
        remote_traceback: the traceback in the worker, as text.
        rank: the worker's number; -1 if it is not known.
    """

    def __init__(self, type_name: str, message: str, remote_traceback: str = "", rank: int = -1) -> None:
        super().__init__(type_name, message, remote_traceback, rank)
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback
        self.rank = rank

    def __str__(self) -> str:
        return f"rank {self.rank} raised {self.type_name}: {self.message}\n{self.remote_traceback}".rstrip()


def _at(coords: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{axis}={at}' for axis, at in coords.items())})" if coords else ""
