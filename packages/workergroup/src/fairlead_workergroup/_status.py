# SPDX-License-Identifier: Apache-2.0
"""The state of the workers of a group while they work or hang, with one request to each node and none to workers."""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fairlead_placement import HeadTimeoutError
from fairlead_placement.extension import format_coords, head_deadline

from ._membership.core import Core
from ._membership.losses import LOOK_S, NOT_NOTICED, explain, look_at_head
from ._model import Member
from ._observe.query import HEAD_S, ask_nodes
from ._remote.node import look, measure
from ._remote.stacks import find_innermost, find_method_frames

State = Literal["starting", "idle", "busy", "stuck", "dead", "restarting", "unknown"]

STUCK_AFTER_S = 300.0
# The entries of a node's answer that a status and a stuck worker show.
STATUS_FIELDS = ("method", "running_s", "since_progress_s", "step", "message", "calls")
STUCK_FIELDS = ("method", "running_s", "since_progress_s", "stacks", "note")
# How many ranks a note names that are not where the others wait.
MOST_NAMED = 8


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


class ObservedGroup:
    """The members of a group that report what its workers do, while they work or hang."""

    _core: Core
    # The CPU seconds of each worker, and when they were measured.
    _measured: Mapping[tuple[int, int], tuple[float, float]] | None = None

    def get_worker_status(self, *, stuck_after_s: float = STUCK_AFTER_S) -> list[WorkerStatus]:
        """Return what each worker does, by rank.

        The records of the workers are read on their nodes, with one request a node, so that this works while workers
        are busy or hang. Ray reports which workers are dead.

        Args:
            stuck_after_s: a busy worker is "stuck" after this many seconds without progress.

        Returns:
            The status of each worker, by rank.

        Raises:
            ValueError: `stuck_after_s` is not a positive number.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return read_statuses(self._core, stuck_after_s)

    def get_resource_usage(self) -> list[WorkerUsage]:
        """Return the resources that the workers' processes use, measured on their nodes with one request a node.

        Returns:
            The usage by rank, without workers whose process is gone or whose node does not answer.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        members = [member for member in self._core.check_alive().members if member.lost is None]
        before, measured = self._measured or {}, {}
        usage = []
        for member, row in zip(members, ask_nodes(members, measure), strict=True):
            if row is not None:
                seconds, since = before.get(member.key, (0.0, row["started_s"]))
                measured[member.key] = row["cpu_s"], row["measured_s"]
                percent = 100 * max(0.0, row["cpu_s"] - seconds) / max(row["measured_s"] - since, 1e-3)
                sizes = row["rss_bytes"], row["gpu_memory_bytes"]
                usage.append(WorkerUsage(member.rank, percent, *sizes, row["num_threads"]))
        self._measured = measured
        return usage

    def detect_stuck_workers(self, timeout_s: float = STUCK_AFTER_S, dump_stacks: bool = True) -> list[StuckWorker]:
        """Return the living workers without progress for `timeout_s` seconds, whether they are busy or stopped.

        Progress is the start or end of a method, an item of a generator, or `report_progress`. When most of the group
        waits at one place, the notes name the ranks that are not there.

        Args:
            timeout_s: the seconds without progress.
            dump_stacks: make the stuck workers write their Python stacks, which works while they hang in native code
                and hold the GIL. The signal for this (SIGRTMIN+5) makes a sleep or a poll in native code return early,
                with EINTR, so only stuck workers get it.

        Returns:
            The stuck workers, by rank.

        Raises:
            ValueError: `timeout_s` is not a positive number.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        statuses, stuck = _look(self._core, check_seconds("timeout_s", timeout_s), dump=dump_stacks)
        return _add_odd_ranks(stuck, {status.rank: status for status in statuses})


def read_statuses(core: Core, stuck_after_s: float) -> list[WorkerStatus]:
    """Return what each worker is doing, by rank."""
    return _look(core, check_seconds("stuck_after_s", stuck_after_s), dump=False)[0]


def _look(core: Core, stuck_after_s: float, *, dump: bool) -> tuple[list[WorkerStatus], list[StuckWorker]]:
    # Take the state before the requests: the next look reports a worker that is replaced during them.
    now = core.check_alive()
    asked = [member for member in now.members if member.lost is None and member.rank not in now.restarting]
    answers: dict[Member, Any] = dict(zip(asked, ask_nodes(asked, look, stuck_after_s, dump), strict=True))
    known = {member: row for member, row in answers.items() if row is not None}
    rows: dict[int, Mapping[str, Any]] = {member.rank: row for member, row in known.items() if not row["gone"]}
    lost = {member: member.failure("killed", NOT_NOTICED) for member, row in known.items() if row["gone"]}
    if silent := answers.keys() - known.keys():
        with contextlib.suppress(HeadTimeoutError), head_deadline(HEAD_S):
            lost |= look_at_head(silent)
    # The next call raises these losses, or restarts the workers, even if no call of the group has met them. A
    # change that is under way ends workers itself.
    present = core.now
    if unexpected := {member: loss for member, loss in lost.items() if member.rank not in present.restarting}:
        core.note(explain(core, unexpected, LOOK_S).items())
    dead = {*now.lost, *(member.rank for member in lost)}
    states: dict[int, State] = {rank: _state_of(rank in dead, rows.get(rank, {})) for rank in range(len(now.members))}
    states |= dict.fromkeys(now.restarting, "restarting")
    statuses = [
        WorkerStatus(
            rank=member.rank,
            name=member.place.name,
            coords=dict(member.coords),
            state=states[member.rank],
            node_id=member.node_id,
            pid=member.pid,
            incarnation=member.incarnation,
            restarts=member.restarts,
            **{name: value for name, value in rows.get(member.rank, {}).items() if name in STATUS_FIELDS},
        )
        for member in now.members
    ]
    return statuses, [
        StuckWorker(
            member.rank,
            dict(member.coords),
            member.node_id,
            member.pid,
            **{name: value for name, value in rows[member.rank].items() if name in STUCK_FIELDS},
            where=find_innermost(rows[member.rank]["stacks"]),
        )
        for member in now.members
        if states[member.rank] == "stuck"
    ]


def _state_of(dead: bool, row: Mapping[str, Any]) -> State:
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


def _add_odd_ranks(stuck: Sequence[StuckWorker], statuses: Mapping[int, WorkerStatus]) -> list[StuckWorker]:
    """Add notes that name the ranks that are not in the method and Python frames where most of the group waits."""
    places = {worker.rank: (worker.method, find_method_frames(worker.stacks)) for worker in stuck}
    ((place, count),) = Counter(places.values()).most_common(1) or [((None, ()), 0)]
    odd = [rank for rank in statuses if places.get(rank) != place]
    if place[0] is None or count < 2 or count <= len(odd) or not odd:
        return list(stuck)
    by_rank = {worker.rank: worker for worker in stuck}
    where = next((worker.where for worker in stuck if places[worker.rank] == place and worker.where), f"{place[0]!r}")
    named = "; ".join(_describe_odd(statuses[rank], by_rank.get(rank)) for rank in odd[:MOST_NAMED])
    named += f"; and {len(odd) - MOST_NAMED} others" if len(odd) > MOST_NAMED else ""
    of_odd = f"{count} others wait at {where}, this rank does not"
    of_others = f"{count - 1} others wait at the same place; not there: {named}"
    return [
        replace(worker, note="; ".join(filter(None, (worker.note, of_odd if worker.rank in odd else of_others))))
        for worker in stuck
    ]


def _describe_odd(status: WorkerStatus, stuck: StuckWorker | None) -> str:
    if stuck is not None and stuck.where:
        return f"rank {status.rank} at {stuck.where}"
    return f"rank {status.rank} {f'in {status.method!r}' if status.method else status.state}"


def check_seconds(name: str, value: Any) -> float:
    """Return a positive number of seconds, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)
