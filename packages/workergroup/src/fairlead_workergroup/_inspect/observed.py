# SPDX-License-Identifier: Apache-2.0
"""The members of a group that report what its workers do, while they work or hang."""

import os
import weakref
from collections.abc import Callable

from .._observe.observer import STUCK_AFTER_S, Observer
from .._observe.status import StuckWorker, WorkerEvent, WorkerStatus, WorkerUsage
from .._observe.watch import Watch
from .stragglers import StragglerReport, find_stragglers
from .timeline import Timeline
from .trace import write_trace


class ObservedGroup:
    """The reports of a group. The group sets what reads them, and the set of the watches that are open."""

    _observer: Observer
    _read_timeline: Callable[[], Timeline]
    _watches: weakref.WeakSet[Watch]

    def get_worker_status(self, *, stuck_after_s: float = STUCK_AFTER_S) -> list[WorkerStatus]:
        """Return what each worker does, by rank, and show the states in `worker_metadata` and the cluster's grid.

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

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what the group has done lately as a Chrome trace, which Perfetto opens.

        It has the latest 512 finished calls of each worker, those that run, the calls of this process with arrows to
        the workers, reported steps, failures and restarts, all by one clock. It holds names and times, and never
        arguments or results. The workers are not asked: the agents of their nodes read it.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        self._observer.roster.check_alive()
        write_trace(self._read_timeline(), path)

    def stragglers(self, method: str | None = None) -> StragglerReport:
        """Return how long each worker takes for its methods, and who is slower than its peers along an axis.

        A worker is slower if the median of its latest calls is at least a tenth above that of its peers, and the
        difference is certain. Workers that wait for each other take equally long, so time in
        `current_worker().waiting()` is not counted; a method that waits without it is undecidable.

        Args:
            method: the name of a method; None for all.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        self._observer.roster.check_alive()
        return find_stragglers(self._read_timeline(), method)

    def watch(
        self,
        interval_s: float = 5.0,
        stuck_after_s: float = STUCK_AFTER_S,
        on_event: Callable[[WorkerEvent], object] | None = None,
        *,
        slow_after_s: float = 60.0,
    ) -> Watch:
        """Check the workers in the background, and report each event of a worker once.

        Each event is logged (logger `fairlead_workergroup`), counted (Ray's metric `fairlead_worker_events`, tags
        `group` and `event`), and passed to `on_event`. The next call knows why a lost worker died.

        Args:
            interval_s: the seconds between two checks, each with one request a node.
            stuck_after_s: the seconds without progress after which a worker is reported as "worker-stuck", as by
                `detect_stuck_workers`.
            on_event: called with each event on the watch's own thread; its exceptions are logged.
            slow_after_s: the seconds without progress after which a call is reported once as "call-slow".

        Returns:
            A handle to close, which is also a context manager. The end of the group closes it too.

        Raises:
            ValueError: a number is not positive.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        self._observer.roster.check_alive()
        watch = Watch(
            self,
            self._observer,
            interval_s=interval_s,
            stuck_after_s=stuck_after_s,
            slow_after_s=slow_after_s,
            on_event=on_event,
        )
        self._watches.add(watch)
        return watch
