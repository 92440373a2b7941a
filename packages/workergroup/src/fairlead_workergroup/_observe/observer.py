# SPDX-License-Identifier: Apache-2.0
"""Observation of the workers of a group while they work or hang, with one request to each node and none to workers."""

import math
from collections.abc import Mapping
from typing import Any

from fairlead_placement.spi import choose_alive, group_pairs, usage_on_nodes

from .._display import Records
from .._membership.model import WorkerProcess
from .._membership.roster import Roster
from .._remote.progress import look
from .evidence import weigh_answers
from .query import ANSWER_S, HEAD_S, ask_nodes, logger
from .status import State, StuckWorker, WorkerStatus, WorkerUsage, state_of
from .stuck import add_odd_ranks, find_innermost

STUCK_AFTER_S = 300.0
# The entries of an agent's answer that a status and a stuck worker show.
STATUS_FIELDS = ("method", "running_s", "since_progress_s", "step", "message", "calls")
STUCK_FIELDS = ("method", "running_s", "since_progress_s", "stacks", "note")


class Observer:
    """Observe the workers of a group; `RayWorkerGroup` documents what each method returns."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster

    def read_status(self, stuck_after_s: float) -> list[WorkerStatus]:
        """Return what each worker is doing, by rank."""
        return Records(self._look(check_seconds("stuck_after_s", stuck_after_s), dump=False)[0])

    def read_usage(self) -> list[WorkerUsage]:
        """Return the resources that each worker's process uses, by rank, as far as they are known."""
        now = self.roster.check_alive()
        living = set(choose_alive({process.node_id for process in now.processes}, timeout_s=HEAD_S))
        there = [one.process for one in now.members if one.process.node_id in living and one.failure is None]
        pids = group_pairs((process.node_id, process.pid) for process in there)
        usage = {}
        for node_id, rows in usage_on_nodes(pids, timeout_s=ANSWER_S).items():
            if isinstance(rows, Exception):
                logger.warning("Cannot look at the workers on node %s: %s", node_id[:8], rows)
                continue
            usage.update({(node_id, row.pid): row for row in rows})
        return Records(
            WorkerUsage(process.rank, row.cpu_percent, row.rss_bytes, row.gpu_memory_bytes, row.num_threads)
            for process in now.processes
            if (row := usage.get((process.node_id, process.pid))) is not None
        )

    def find_stuck(self, timeout_s: float, *, dump_stacks: bool) -> list[StuckWorker]:
        """Return the workers that are alive and have made no progress for `timeout_s`."""
        statuses, stuck = self._look(check_seconds("timeout_s", timeout_s), dump=dump_stacks)
        return Records(add_odd_ranks(stuck, {status.rank: status for status in statuses}))

    def _look(self, stuck_after_s: float, *, dump: bool) -> tuple[list[WorkerStatus], list[StuckWorker]]:
        # Take the snapshot before the requests: the next look reports a worker that is replaced meanwhile.
        now = self.roster.check_alive()
        dead, judge = set(now.lost), self.roster.judge
        asked = [
            member.process for member in now.members if member.rank not in dead and member.rank not in now.restarting
        ]
        answers = ask_nodes(asked, look, stuck_after_s, dump)
        ended = [None if row is None else bool(row["gone"]) for row in answers]
        verdicts = {worker: judge.tell(worker, *found) for worker, found in weigh_answers(asked, ended).items()}
        silent = [worker for worker, verdict in verdicts.items() if verdict.state == "unknown"]
        verdicts.update(judge.ask(silent, look="head", within_s=HEAD_S))
        dead |= {worker.rank for worker, verdict in verdicts.items() if verdict.is_lost}
        rows: dict[int, Mapping[str, Any]] = {
            worker.rank: row
            for worker, row in zip(asked, answers, strict=True)
            if row is not None and worker.rank not in dead
        }
        states: dict[int, State] = {
            member.rank: "restarting" if member.restarting else state_of(member.rank in dead, rows.get(member.rank, {}))
            for member in now.members
        }
        statuses = [
            WorkerStatus(
                rank=member.rank,
                name=member.place.name,
                coords=dict(member.coords),
                state=states[member.rank],
                node_id=member.process.node_id,
                pid=member.process.pid,
                incarnation=member.incarnation,
                restarts=member.restarts,
                **{name: value for name, value in rows.get(member.rank, {}).items() if name in STATUS_FIELDS},
            )
            for member in now.members
        ]
        self.roster.show_states(states, now)
        return statuses, [
            _stuck(process, rows[process.rank]) for process in now.processes if states[process.rank] == "stuck"
        ]


def _stuck(worker: WorkerProcess, row: Mapping[str, Any]) -> StuckWorker:
    shown = {name: row[name] for name in STUCK_FIELDS}
    where = find_innermost(row["stacks"])
    return StuckWorker(worker.rank, dict(worker.coords), worker.node_id, worker.pid, **shown, where=where)


def check_seconds(name: str, value: Any) -> float:
    """Return a positive number of seconds, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)
