# SPDX-License-Identifier: Apache-2.0
"""Looking at the workers of a group while they work, or hang: one request a node, and none to a worker."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from fairlead_placement.spi import alive_nodes, usage_on_nodes

from .._display import Records
from .._ray_private import actor_id_of, dead_actors
from .._remote.records import look
from ..exceptions import WorkerFailure
from .failures import WorkerFacts
from .query import ANSWER_S, logger, looked_at
from .status import State, StuckWorker, WorkerEvent, WorkerStatus, WorkerUsage
from .stuck import innermost, with_odd_ranks
from .watch import Watch

__all__ = ["Watched"]

STUCK_AFTER_S = 300.0


class Watched:
    """What `RayWorkerGroup` tells of its workers."""

    workers: list[Any]
    worker_metadata: list[dict[str, Any]]
    _lock: threading.Lock
    _workers_now: list[WorkerFacts]
    _lost: dict[int, WorkerFailure]
    _incarnations: list[int]
    _restarts: list[int]
    _restarting: set[int]
    _watches: WeakSet[Watch]

    def _living(self) -> list[Any]:
        """See `Dispatching`."""
        raise NotImplementedError

    def get_worker_status(self, *, stuck_after_s: float = STUCK_AFTER_S) -> list[WorkerStatus]:
        """What each worker is doing, by rank; `worker_metadata` and the cluster's grid show the states from then on.

        The workers are not asked: their records are read on their nodes, one request a node, so that it works while
        they are busy or hang. Who is dead is known from Ray.

        Args:
            stuck_after_s: a busy worker without progress for so many seconds is "stuck".

        Raises:
            ValueError: `stuck_after_s` is not a positive number.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return Records(self._look(_seconds("stuck_after_s", stuck_after_s), dump=False)[0])

    def get_resource_usage(self) -> list[WorkerUsage]:
        """What the worker's processes use, by rank, measured on their nodes: one request a node.

        Left out are workers whose process is gone, or whose node does not answer.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        who = self._known()
        living = alive_nodes()
        pids: dict[str, list[int]] = {}
        for worker in who:
            if worker.node_id in living and worker.rank not in self._lost:
                pids.setdefault(worker.node_id, []).append(worker.pid)
        found = {}
        for node_id, rows in usage_on_nodes(pids, timeout_s=ANSWER_S).items():
            if isinstance(rows, Exception):
                logger.warning("cannot look at the workers on node %s: %s", node_id[:8], rows)
                continue
            found.update({(node_id, row.pid): row for row in rows})
        used = [(worker.rank, found.get((worker.node_id, worker.pid))) for worker in who]
        return Records(
            WorkerUsage(rank, row.cpu_percent, row.rss_bytes, row.gpu_memory_bytes, row.num_threads)
            for rank, row in used
            if row is not None
        )

    def detect_stuck_workers(self, timeout_s: float = STUCK_AFTER_S, dump_stacks: bool = True) -> list[StuckWorker]:
        """The workers that live and do not get on: busy, or stopped, without progress for `timeout_s` seconds.

        Progress is the start or end of a method, an item of a generator, or `report_progress`. When most of the group
        waits at one place, the notes name the ranks that are not there.

        Args:
            timeout_s: seconds without progress.
            dump_stacks: have those that are stuck, and nobody else, write their Python stacks, which works while they
                hang in native code and hold the GIL. The signal for it (SIGRTMIN+5) makes a sleep or a poll in native
                code return early, with EINTR.

        Raises:
            ValueError: `timeout_s` is not a positive number.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        statuses, stuck = self._look(_seconds("timeout_s", timeout_s), dump=dump_stacks)
        return Records(with_odd_ranks(stuck, {status.rank: status for status in statuses}))

    def watch(
        self,
        interval_s: float = 5.0,
        stuck_after_s: float = STUCK_AFTER_S,
        on_event: Callable[[WorkerEvent], object] | None = None,
        *,
        slow_after_s: float = 60.0,
    ) -> Watch:
        """Look at the workers in the background, and tell once of everything that happens to one.

        Each event is logged (logger `fairlead_workergroup`), counted (Ray's metric `fairlead_worker_events`, tags
        `group` and `event`), and given to `on_event`. What a lost worker died of is known to the next call.

        Args:
            interval_s: seconds between two looks, of one request a node each.
            stuck_after_s: "worker-stuck" when a worker has made no progress for so many seconds, as of
                `detect_stuck_workers`.
            on_event: called with each event, on the watch's own thread; what it raises is logged.
            slow_after_s: "call-slow", once a call, when it has made no progress for so many seconds.

        Returns:
            A handle to close; a context manager. The end of the group ends it too.

        Raises:
            ValueError: a number that is not positive.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        self._known()
        watch = Watch(
            self,  # type: ignore[arg-type]
            interval_s=_seconds("interval_s", interval_s),
            stuck_after_s=_seconds("stuck_after_s", stuck_after_s),
            slow_after_s=_seconds("slow_after_s", slow_after_s),
            on_event=on_event,
        )
        self._watches.add(watch)
        return watch

    def _end_watches(self) -> None:
        for watch in list(self._watches):
            watch.close()

    def _known(self) -> list[WorkerFacts]:
        self._living()
        return list(self._workers_now)

    def _look(self, stuck_after_s: float, *, dump: bool) -> tuple[list[WorkerStatus], list[StuckWorker]]:
        # Before anybody is asked: who is replaced meanwhile is told of by the next look, not half in this one.
        with self._lock:
            who, workers, lost = self._known(), list(self.workers), set(self._lost)
            incarnations, restarts, restarting = list(self._incarnations), list(self._restarts), set(self._restarting)
        gone = dead_actors()
        dead = {rank for rank, worker in enumerate(workers) if rank in lost or actor_id_of(worker) in gone}
        asked = [worker for worker in who if worker.rank not in dead and worker.rank not in restarting]
        answers = looked_at(asked, look, lambda worker: worker.process, stuck_after_s, dump)
        rows: dict[int, Mapping[str, Any]] = {}
        cut_off = self._on_lost_nodes([one for one, row in zip(asked, answers, strict=True) if row is None])
        for worker, row in zip(asked, answers, strict=True):
            if worker.rank in cut_off or (row is not None and row["gone"]):
                dead.add(worker.rank)
            elif row is not None:
                rows[worker.rank] = row
        names = {worker["global_rank"]: worker["name"] for worker in self.worker_metadata}
        states: dict[int, State] = {rank: _state(rank in dead, rows.get(rank, {})) for rank in range(len(who))}
        states.update(dict.fromkeys(restarting, "restarting"))
        statuses = [
            WorkerStatus(
                rank=rank,
                name=names.get(rank, ""),
                coords=dict(worker.coords),
                state=states[rank],
                node_id=worker.node_id,
                pid=worker.pid,
                incarnation=incarnations[rank],
                restarts=restarts[rank],
                **{name: value for name, value in rows.get(rank, {}).items() if name in _SHOWN},
            )
            for rank, worker in enumerate(who)
        ]
        with self._lock:
            for shown in self.worker_metadata:  # nothing after a shutdown
                rank = shown["global_rank"]
                if self._workers_now[rank] is who[rank]:
                    shown["state"] = states[rank]
        return statuses, [_stuck(worker, rows[worker.rank]) for worker in who if states[worker.rank] == "stuck"]

    @staticmethod
    def _on_lost_nodes(workers: Sequence[WorkerFacts]) -> set[int]:
        if not workers:
            return set()
        living = alive_nodes()
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
        where=innermost(row["stacks"]),
        note=row["note"],
    )


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)
