# SPDX-License-Identifier: Apache-2.0
"""Observation of the workers of a group while they work or hang, with one request to each node and none to workers."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from fairlead_placement import HeadTimeoutError
from fairlead_placement.extension import head_deadline

from ._membership.core import Core
from ._membership.losses import LOOK_S, NOT_NOTICED, explain, look_at_head
from ._model import Member
from ._observe.query import HEAD_S, ask_nodes
from ._observe.status import State, StuckWorker, WorkerStatus, WorkerUsage, state_of
from ._observe.stuck import add_odd_ranks, find_innermost
from ._remote.node import look, measure

STUCK_AFTER_S = 300.0
# The entries of a node's answer that a status and a stuck worker show.
STATUS_FIELDS = ("method", "running_s", "since_progress_s", "step", "message", "calls")
STUCK_FIELDS = ("method", "running_s", "since_progress_s", "stacks", "note")


class Observer:
    """Observe the workers of a group; `RayWorkerGroup` documents what each method returns."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # The CPU seconds of each worker, and when they were measured.
        self._measured: dict[tuple[int, int], tuple[float, float]] = {}

    def read_status(self, stuck_after_s: float) -> list[WorkerStatus]:
        """Return what each worker is doing, by rank."""
        return self._look(check_seconds("stuck_after_s", stuck_after_s), dump=False)[0]

    def read_usage(self) -> list[WorkerUsage]:
        """Return the resources that each worker's process uses, by rank, as far as they are known."""
        members = [member for member in self._core.check_alive().members if member.lost is None]
        before, self._measured = self._measured, {}
        usage = []
        for member, row in zip(members, ask_nodes(members, measure), strict=True):
            if row is not None:
                seconds, since = before.get(member.key, (0.0, row["started_s"]))
                self._measured[member.key] = row["cpu_s"], row["measured_s"]
                percent = 100 * max(0.0, row["cpu_s"] - seconds) / max(row["measured_s"] - since, 1e-3)
                sizes = row["rss_bytes"], row["gpu_memory_bytes"]
                usage.append(WorkerUsage(member.rank, percent, *sizes, row["num_threads"]))
        return usage

    def find_stuck(self, timeout_s: float, *, dump_stacks: bool) -> list[StuckWorker]:
        """Return the workers that are alive and have made no progress for `timeout_s`."""
        statuses, stuck = self._look(check_seconds("timeout_s", timeout_s), dump=dump_stacks)
        return add_odd_ranks(stuck, {status.rank: status for status in statuses})

    def _look(self, stuck_after_s: float, *, dump: bool) -> tuple[list[WorkerStatus], list[StuckWorker]]:
        # Take the state before the requests: the next look reports a worker that is replaced during them.
        now = self._core.check_alive()
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
        present = self._core.now
        if unexpected := {member: loss for member, loss in lost.items() if member.rank not in present.restarting}:
            self._core.note(explain(self._core, unexpected, LOOK_S).items())
        dead = {*now.lost, *(member.rank for member in lost)}
        states: dict[int, State] = {
            rank: state_of(rank in dead, rows.get(rank, {})) for rank in range(len(now.members))
        }
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
        return statuses, [_stuck(member, rows[member.rank]) for member in now.members if states[member.rank] == "stuck"]


class ObservedGroup:
    """The members of a group that report what its workers do, while they work or hang; the group sets the observer."""

    _observer: Observer

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
        return self._observer.read_status(stuck_after_s)

    def get_resource_usage(self) -> list[WorkerUsage]:
        """Return the resources that the workers' processes use, measured on their nodes with one request a node.

        Returns:
            The usage by rank, without workers whose process is gone or whose node does not answer.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._observer.read_usage()

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
        return self._observer.find_stuck(timeout_s, dump_stacks=dump_stacks)


def _stuck(worker: Member, row: Mapping[str, Any]) -> StuckWorker:
    shown = {name: row[name] for name in STUCK_FIELDS}
    where = find_innermost(row["stacks"])
    return StuckWorker(worker.rank, dict(worker.coords), worker.node_id, worker.pid, **shown, where=where)


def check_seconds(name: str, value: Any) -> float:
    """Return a positive number of seconds, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)
