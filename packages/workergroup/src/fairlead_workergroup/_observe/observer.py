# SPDX-License-Identifier: Apache-2.0
"""Looking at the workers of a group while they work or hang: one request a node, and none to a worker."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead_placement.spi import alive_nodes, usage_on_nodes

from .._display import Records
from .._members import Roster, WorkerFacts
from .._ray_private import actor_id_of, dead_actors
from .._remote.progress import look
from .query import ANSWER_S, ask_nodes, logger, process_of
from .status import State, StuckWorker, WorkerStatus, WorkerUsage
from .stuck import add_odd_ranks, find_innermost

__all__ = ["Observer", "STUCK_AFTER_S", "check_seconds"]

STUCK_AFTER_S = 300.0


class Observer:
    """Looks at the workers of a group; `RayWorkerGroup` says what each method returns.

    Args:
        roster: of the group.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def read_status(self, stuck_after_s: float) -> list[WorkerStatus]:
        """Return what each worker is doing, by rank."""
        return Records(self._look(check_seconds("stuck_after_s", stuck_after_s), dump=False)[0])

    def read_usage(self) -> list[WorkerUsage]:
        """Return what each worker's process uses, by rank, as far as it is known."""
        now = self._roster.check_alive()
        living = alive_nodes()
        pids: dict[str, list[int]] = {}
        for member in now.members:
            if member.facts.node_id in living and member.failure is None:
                pids.setdefault(member.facts.node_id, []).append(member.facts.pid)
        found = {}
        for node_id, rows in usage_on_nodes(pids, timeout_s=ANSWER_S).items():
            if isinstance(rows, Exception):
                logger.warning("cannot look at the workers on node %s: %s", node_id[:8], rows)
                continue
            found.update({(node_id, row.pid): row for row in rows})
        used = [(facts.rank, found.get((facts.node_id, facts.pid))) for facts in now.facts]
        return Records(
            WorkerUsage(rank, row.cpu_percent, row.rss_bytes, row.gpu_memory_bytes, row.num_threads)
            for rank, row in used
            if row is not None
        )

    def find_stuck(self, timeout_s: float, *, dump_stacks: bool) -> list[StuckWorker]:
        """Return the workers that live and have made no progress for so long."""
        statuses, stuck = self._look(check_seconds("timeout_s", timeout_s), dump=dump_stacks)
        return Records(add_odd_ranks(stuck, {status.rank: status for status in statuses}))

    def _look(self, stuck_after_s: float, *, dump: bool) -> tuple[list[WorkerStatus], list[StuckWorker]]:
        # Before anybody is asked: a worker that is replaced meanwhile is reported by the next look, not half in this.
        now = self._roster.check_alive()
        gone = dead_actors()
        dead = {
            member.rank for member in now.members if member.failure is not None or actor_id_of(member.handle) in gone
        }
        asked = [
            member.facts for member in now.members if member.rank not in dead and member.rank not in now.restarting
        ]
        answers = ask_nodes(asked, look, process_of, stuck_after_s, dump)
        rows: dict[int, Mapping[str, Any]] = {}
        cut_off = _find_on_lost_nodes([one for one, row in zip(asked, answers, strict=True) if row is None])
        for worker, row in zip(asked, answers, strict=True):
            if worker.rank in cut_off or (row is not None and row["gone"]):
                dead.add(worker.rank)
            elif row is not None:
                rows[worker.rank] = row
        states: dict[int, State] = {
            member.rank: "restarting" if member.restarting else _state(member.rank in dead, rows.get(member.rank, {}))
            for member in now.members
        }
        statuses = [
            WorkerStatus(
                rank=member.rank,
                name=member.place.name,
                coords=dict(member.coords),
                state=states[member.rank],
                node_id=member.facts.node_id,
                pid=member.facts.pid,
                incarnation=member.incarnation,
                restarts=member.restarts,
                **{name: value for name, value in rows.get(member.rank, {}).items() if name in _SHOWN},
            )
            for member in now.members
        ]
        self._roster.observed(states, now)
        return statuses, [_stuck(facts, rows[facts.rank]) for facts in now.facts if states[facts.rank] == "stuck"]


def _find_on_lost_nodes(workers: Sequence[WorkerFacts]) -> set[int]:
    """Return the ranks of those whose node is lost."""
    living = alive_nodes() if workers else frozenset()
    return {worker.rank for worker in workers if worker.node_id not in living}


_SHOWN = ("method", "running_s", "since_progress_s", "step", "message", "calls")


def _state(dead: bool, row: Mapping[str, Any]) -> State:
    if dead:
        return "dead"
    if "method" not in row:
        return "unknown"
    if row["stuck"]:
        return "stuck"
    if row["method"] == "__init__":
        return "starting"
    return "busy" if row["method"] else "idle"


def _stuck(worker: WorkerFacts, row: Mapping[str, Any]) -> StuckWorker:
    return StuckWorker(
        worker.rank,
        dict(worker.coords),
        worker.node_id,
        worker.pid,
        row["method"],
        row["running_s"],
        row["since_progress_s"],
        stacks=row["stacks"],
        where=find_innermost(row["stacks"]),
        note=row["note"],
    )


def check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)
