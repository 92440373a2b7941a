# SPDX-License-Identifier: Apache-2.0
"""A group of workers: one process in each slot, called by rank or along named axes."""

import math
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

import ray

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_placement.spi import release_when_dropped
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from ._builder import ClassLike, RayWorkerBuilder
from ._calls.call import dispatch
from ._calls.classic import ClassicCalls
from ._calls.execution import Execution
from ._calls.lane import open_lane, serving_handles
from ._calls.map import MapOptions, Strategy
from ._calls.plan import CallOptions, Column, Mesh, Recipients
from ._calls.results import ClassicFutures
from ._calls.sender import Sender
from ._calls.view import Target, TypedCalls
from ._context import Compression, check_compression
from ._deadline import check_timeout
from ._display import table_html
from ._elastic.drain import DrainWatch
from ._elastic.replace import Replacer
from ._elastic.resize import Resizer
from ._handle import GroupHandle, GroupIdentity, attach
from ._inspect.groups import find_own_group
from ._inspect.stragglers import StragglerReport, find_stragglers
from ._inspect.timeline import Timeline, read_timeline
from ._inspect.trace import TraceSaver, write_trace
from ._lifecycle.launcher import GroupSpec, Launcher
from ._lifecycle.resources import Resources
from ._lifecycle.restart import Restarter, RestartPolicy, UserMethods
from ._lifecycle.shutdown import request_cleanup, wait_for_cleanup
from ._lifecycle.standbys import Standbys
from ._members import Roster
from ._observe.failures import Verdicts
from ._observe.memory import MemoryLimit, parse_memory
from ._observe.observer import STUCK_AFTER_S, Observer
from ._observe.query import find_dead
from ._observe.requests import RequestLog
from ._observe.statistics import Counters, GroupStatistics
from ._observe.status import StuckWorker, WorkerEvent, WorkerStatus, WorkerUsage
from ._observe.watch import Watch
from ._start.environment import check_env_vars, choose_python
from ._start.layout import lay_out
from ._start.report import StartClock, StartReport

# The time that the shutdown of another thread may take once its workers are gone, when it has nothing to wait for.
CLEANED_S = 10.0


class RayWorkerGroup(TypedCalls, ClassicCalls):
    """A group of worker processes, one in each slot, made from one class and called by rank or along named axes.

    Args:
        cluster: the place of the workers: a `RayVirtualCluster`, which is reserved here if it is not yet, or slots.
        remote_worker_builder: a `RayWorkerBuilder`; or a class or its full name, which is constructed without
            arguments.
        workers_per_node: the number of workers on each logical node: None for one in each slot, a number, or a list
            with a number for each logical node in use.
        name_prefix: the first part of the workers' names; the class's name if empty.
        bundle_indices_list: instead of `workers_per_node`, `(node_idx, [Ray's bundle indices])` for each *tied group*,
            whose workers share one model copy.
        sharding_annotations: the axes over the ranks; one axis `worker` if None.
        env_vars: environment variables of the workers. The driver's environment is not copied to them.
        python: the Python of the workers: a `VenvSpec` or a uv command, which is built on their nodes if necessary; the
            path of an interpreter that all nodes have; or None for the entry of the class in `actor_environments` of
            fairlead-venvs, and otherwise the driver's Python. It must have the cluster's version of Ray, and needs
            no package of Fairlead.
        restart_on_failure: restart lost workers before the next call that reaches one of them. The call that met the
            loss still raises, unless it was made with `retries`.
        max_restarts: the number of restarts for each rank, or with scope "group" for the group.
        restart_scope: "worker" restarts only the lost workers; "group" restarts all workers with a new master port,
            which collectives need. With `restart_on_failure` and "group", every call restarts them while a worker is
            lost.
        on_restart: a method of the class, without arguments, that restarted workers run first, such as one that reloads
            a checkpoint.
        on_resize: a method of the class, without arguments, that all workers run in the new epoch of a `resize`, such
            as one that sets up the collectives again.
        standby: how many more processes wait in slots that the group does not use, with the environment and the
            class's module loaded and without its constructor run. A lost rank takes one instead of a new process, on
            its own node if there is one there, and moves to its slot. They have no rank: a module that reads RANK when
            it is imported finds none.
        on_handover: a method of the class, without arguments, that a worker runs before `replace` ends it. Its result
            is the argument of `on_restart` in the worker that takes over the rank.
        on_drain: "replace" moves the workers of a node that Ray drains, such as one that will be preempted, to
            standbys or free slots on other nodes.
        memory_limit: the memory, in bytes or as "8GB" or "512MiB", that a worker and the processes that it has started
            may hold together after its constructor has finished. Above it, Fairlead ends all of them, with kind
            "out-of-memory". Files, shared memory and the values of the object store do not count.
        async_communication: let the async methods of a worker overlap on one event loop, which its other methods
            block. Otherwise a worker runs one method at a time.
        enable_load_balancing: if a worker dies, let `map` move its items to the others.
        load_balancing_strategy: chooses the worker of the next item of `map`: "round_robin", "least_loaded", or a
            function that takes the number of items of each worker and returns the position of one worker.
        enable_gradient_compression: the compression that `fairlead_workergroup.torch.wrap_ddp` uses in the workers:
            True or "fp16", "bf16", "powersgd", or False for none.
        call_timeout_s: the timeout in seconds of a `call` without one of its own; None for no limit.
        start_timeout_s: the seconds that all constructors together may take.

    Raises:
        TypeError, ValueError: an argument is not valid; nothing has been launched.
        ResourceInsufficientError, PlacementTimeoutError: the cluster could not be reserved, or has no room for another
            group.
        WorkerStartError: a worker did not start. All workers have been ended.

    The constructor returns when every worker's `__init__` has finished. Use the group as a context manager, or call
    `shutdown`.

    Attributes:
        cluster: as given.
        name_prefix: the first part of the workers' names; the class's name if none was given.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster | Sequence[Slot],
        remote_worker_builder: RayWorkerBuilder | ClassLike,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        python: str | VenvSpec | None = None,
        restart_on_failure: bool = False,
        max_restarts: int = 3,
        restart_scope: Literal["worker", "group"] = "worker",
        on_restart: str | None = None,
        on_resize: str | None = None,
        standby: int = 0,
        on_handover: str | None = None,
        on_drain: Literal["replace"] | None = None,
        memory_limit: int | str | None = None,
        async_communication: bool = False,
        enable_load_balancing: bool = False,
        load_balancing_strategy: Strategy = "round_robin",
        enable_gradient_compression: bool | Compression = False,
        call_timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        builder = remote_worker_builder
        if not isinstance(builder, RayWorkerBuilder):
            builder = RayWorkerBuilder(builder)
        env_vars = dict(env_vars or {})
        check_env_vars(env_vars)
        if not 0 < start_timeout_s < math.inf:
            raise ValueError(f"start_timeout_s must be positive and finite, got {start_timeout_s!r}")
        call_timeout_s = check_timeout("call_timeout_s", call_timeout_s)
        self._map_options = MapOptions(strategy=load_balancing_strategy, move_items=enable_load_balancing)
        compression = check_compression(enable_gradient_compression)
        policy = RestartPolicy(restart_on_failure, max_restarts, restart_scope)
        # It is unique on a node: the processes that carry it end with the group.
        token = uuid.uuid4().hex
        if on_handover is not None and on_restart is None:
            raise ValueError("on_handover needs on_restart, the method that receives what a worker hands over")
        if on_drain not in (None, "replace"):
            raise ValueError(f"on_drain must be 'replace' or None, got {on_drain!r}")
        limit = None if memory_limit is None else MemoryLimit(token, parse_memory(memory_limit))
        clock = StartClock()
        with clock.phase("reserve"):
            slots = cluster.slots() if isinstance(cluster, RayVirtualCluster) else tuple(cluster)
        self.name_prefix: str = name_prefix or builder.ray_actor_class_fqn.rpartition(".")[2]
        places = lay_out(
            slots,
            prefix=self.name_prefix,
            workers_per_node=workers_per_node,
            bundle_indices_list=bundle_indices_list,
        )
        self.cluster = cluster
        self._roster = Roster(self.name_prefix, places, _check_sharding(sharding_annotations, len(places)))
        self._resources = Resources(self._roster)
        self._counters = Counters()
        self._observer = Observer(self._roster)
        self._verdicts = Verdicts(self._roster, limit)
        facts = {
            "communication_backend": getattr(cluster, "communication_backend", None),
            "gradient_compression": compression,
        }
        spec = GroupSpec(
            cluster=cluster,
            worker=builder.worker,
            args=builder.args,
            kwargs=builder.kwargs,
            python=choose_python(python, builder.ray_actor_class_fqn),
            env_vars=env_vars,
            facts=facts,
            memory_limit=limit,
            token=token,
            concurrent=async_communication,
            start_timeout_s=float(start_timeout_s),
        )
        self._launcher = Launcher(spec, self._resources, self._counters, clock)
        self._standbys = Standbys(self._launcher, standby)
        restarter = Restarter(self._launcher, self._verdicts, policy, self._standbys, slots=slots)
        self._sender = Sender(
            self._roster,
            self._launcher,
            restarter,
            self._verdicts,
            self._counters,
            RequestLog(token),
            save_trace=TraceSaver(partial(_read_timeline, self._resources)).save_for,
            call_timeout_s=call_timeout_s,
            methods=partial(_user_methods, on_restart, on_resize, on_handover, float(start_timeout_s)),
        )
        self._classic_futures = ClassicFutures(self._sender)
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        # Held by the thread that runs the cleanup. It is reentrant because a signal handler may shut down meanwhile.
        self._cleaning = threading.RLock()
        self._shut: bool | None = None

        self._resizer = Resizer(self._sender, self._launcher)
        self._replacer = Replacer(self._sender, self._launcher, self._standbys)
        self._resources.claim_slots([place.slot for place in places])
        release_when_dropped(self, self._resources.leak, self._resources.give_back)
        try:
            self._launcher.prepare(places)
            for method in (on_restart, on_resize, on_handover):
                if method is not None:
                    self._sender.method(method).check((), {})
            if on_handover is not None and on_restart is not None:
                self._sender.method(on_restart).check((None,), {})
            self._standbys.reserve(slots)
            self._launcher.store()
            self._launcher.start(range(self.world_size), epoch=0)
            self._start_report = clock.report(self.name_prefix)
            self._standbys.fill()
            if on_drain is not None:
                DrainWatch(self, self._roster, RayWorkerGroup.replace)
        except BaseException:
            self.shutdown(force=True)
            raise

    def __repr__(self) -> str:
        return repr(self._roster)

    def _repr_html_(self) -> str:
        shown = ("global_rank", "name", "state", "node_idx", "node_id")
        now = self._roster.snapshot()
        rows = [(*(worker[key] for key in shown), now[worker["global_rank"]].coords) for worker in self.worker_metadata]
        return table_html(repr(self), (*shown, "coords"), rows)

    @property
    def workers(self) -> list[Any]:
        """The actor handles, by rank: `group.workers[0].step.remote(x)`; empty after `shutdown`.

        While a lane is open, they refuse the methods of the class with `LaneError`: such a call would wait until the
        lane closes.
        """
        return serving_handles(self._roster)

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """A dict for each worker; empty after `shutdown`."""
        return self._roster.worker_metadata

    @property
    def master_address(self) -> str:
        """The address of the node of rank 0, where the store of the workers' process group runs."""
        return self._launcher.master[0]

    @property
    def master_port(self) -> int:
        """The port that is leased there for the store."""
        return self._launcher.master[1]

    @property
    def _target(self) -> Target:
        # It is not stored: it refers to the group, which must be released when its last reference is.
        sharding = self.sharding_annotations
        return Target(self._sender, self, Mesh(sharding), sharding, self._map_options)

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self._roster.snapshot().members)

    @property
    def sharding_annotations(self) -> NamedSharding:
        """The axes over the ranks."""
        return self._roster.snapshot().sharding

    @property
    def standby(self) -> int:
        """The number of standbys that are ready; those that were used or have died are started again."""
        return self._standbys.count_warm() if self.workers else 0

    @property
    def standby_metadata(self) -> list[dict[str, Any]]:
        """A dict for each standby: its place, and whether it is "warm" or "starting"; empty after `shutdown`."""
        return self._roster.standby_metadata

    @property
    def epoch(self) -> int:
        """The number of changes of membership so far: restarts, resizes and replacements.

        Every call runs in one epoch: no worker sees it with the facts of another one.
        """
        return self._roster.snapshot().epoch

    @property
    def dp_size(self) -> int:
        """The number of tied groups; compatible with the original system."""
        return self._roster.snapshot().places[-1].tied_group + 1

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The ranks of the first workers of the tied groups; compatible with the original system."""
        return [place.rank for place in self._roster.snapshot().places if place.tied_rank == 0]

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the rank of the first worker of a tied group; compatible with the original system.

        Raises:
            IndexError: there is no such tied group.
        """
        leaders = self.dp_leader_worker_indices
        if not 0 <= dp_shard_idx < len(leaders):
            raise IndexError(f"dp_shard_idx {dp_shard_idx} is out of range: valid are 0 to {len(leaders) - 1}")
        return leaders[dp_shard_idx]

    @property
    def start_report(self) -> StartReport:
        """How long the start of the group took: by phase, and for the slowest workers. Restarts do not change it."""
        return self._start_report

    def statistics(self) -> GroupStatistics:
        """Return the counts of what has been stored, sent and fetched so far."""
        return self._counters.now

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
        self._roster.check_alive()
        write_trace(_read_timeline(self._resources), path)

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
        self._roster.check_alive()
        return find_stragglers(_read_timeline(self._resources), method)

    def handle(self) -> GroupHandle:
        """Return a handle of the group, with which other processes of the cluster can call it.

        Returns:
            The handle, which can be pickled, such as an argument of a Ray task or actor.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        self._roster.check_alive()
        job_id = ray.get_runtime_context().get_job_id()
        return GroupHandle(GroupIdentity.here(self.name_prefix, self._launcher.spec.token, job_id))

    @staticmethod
    def attach(name: str, address: str | None = None) -> GroupHandle:
        """Return a handle of a group that another process of a cluster has made.

        Args:
            name: the name of the group, or the beginning of its id, as `python -m fairlead_workergroup groups` shows
                them.
            address: the address of the cluster, as for `init_ray`; None for the one that this process is connected to,
                or that `RAY_ADDRESS` names, or that runs on this machine.

        Raises:
            WorkerGroupError: there is no such group, or there are several.
            PlacementError: there is no cluster, it wants another token, or this process is connected to another one.
        """
        return attach(name, address)

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
        self._roster.check_alive()
        watch = Watch(
            self,
            self._roster,
            self._observer,
            self._verdicts,
            interval_s=interval_s,
            stuck_after_s=stuck_after_s,
            slow_after_s=slow_after_s,
            on_event=on_event,
        )
        self._watches.add(watch)
        return watch

    def lane(self, timeout: float = 60.0) -> AbstractContextManager[None]:
        """Send the calls of this group as messages instead of as Ray actor calls, which is several times faster.

        `call`, `map` and the calls of views work as without it. A call leaves the lane if its arguments hold
        references or actor handles; if it returns ObjectRefs, as most classic methods do; or if its generator method
        limits how far it may be ahead. Such a call goes by Ray, in its turn, and takes longer. `explain` and
        `Call.statistics()` say which way a call goes.

        Opening waits until all workers have finished their earlier calls, and closing until they have finished those
        that were made meanwhile. Opening it again inside does nothing. Ray's task events and `get_task_id()` do not
        show the calls. Needs the extra `lane`, and pyzmq in the Python of the workers.

        Args:
            timeout: the seconds that opening, and closing, may take.

        Returns:
            A context manager.

        Raises:
            LaneError: pyzmq is missing, or a worker did not follow in time; the error names it.
            WorkerGroupError: the group, or its Ray, has been shut down.

        >>> with group.lane():  # doctest: +SKIP
        ...     for step in range(100_000):
        ...         group.call("tick", step).result()
        """
        check_timeout("timeout", timeout)
        return open_lane(self._sender, self._resources, timeout)

    def restart_failed_workers(self) -> list[int]:
        """Restart the dead workers: the same ranks with the same arguments, and the next incarnation.

        A worker restarts in its slot or, if its node is gone, in the slot that the cluster's `replace_lost_nodes`
        reserves in its place. With `restart_scope="group"` all workers are ended and started, with a new master port.
        Then the restarted workers run `on_restart`. Calls of other threads wait meanwhile.

        Returns:
            The ranks that were started; an empty list if no worker is dead.

        Raises:
            WorkerFailureError: `max_restarts` is used up, there is no slot, or a worker did not start (kind
                "start-failed"). Dead workers stay dead, and you can try again.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._sender.restart()

    def resize(self, /, *, slots: Sequence[Slot] | None = None, timeout: float | None = None, **sizes: int) -> int:
        """Change the number of workers along the slowest-varying axis: `group.resize(dp=6)`.

        The workers that stay keep their ranks and their state. New coordinates start in slots that the group does not
        use; the last coordinates leave. First the new workers start completely, while calls go on. Then calls of other
        threads wait until those before have ended, all workers get the facts of the new epoch (`world_size`, the mesh,
        `MASTER_PORT`, other rank variables), and run `on_resize`. Workers that leave finish their calls first.
        Lost workers that stay are started again.

        Args:
            slots: the slots of the new workers, in order; None for the first free ones of the cluster, which
                `cluster.extend` adds.
            timeout: the seconds that all of this may take; None for `start_timeout_s`. Workers that leave and have not
                finished by then are ended.
            sizes: the axis and its new size.

        Returns:
            The epoch of the group.

        Raises:
            TypeError, ValueError: not one axis; another axis than the slowest-varying one; a size below 1; too few
                slots; or a tied group would be cut. Nothing has changed, as with the next three.
            ResourceInsufficientError: a given slot has no room for another group.
            WorkerStartError: a new worker did not start.
            ResizeTimeoutError: calls, or another change of the group, took longer than `timeout`.
            BrokenEpochError: a worker failed or was late after the epoch had begun, which cannot be undone, because
                others have given up their collectives. `restart_failed_workers()` or another `resize` repairs it.
            WorkerFailureError: a lost worker that stays cannot be restarted.
            WorkerGroupError: the group, or its Ray, has been shut down; or this process is one of its workers.
        """
        return self._resizer.resize(sizes, slots, check_timeout("timeout", timeout))

    def replace(self, ranks: Sequence[int], timeout: float | None = None) -> int:
        """Move ranks to standbys, or to new processes in free slots of the cluster, whether their workers live or not.

        Their processes are prepared first, while calls go on. Then the old workers finish their calls, run
        `on_handover` if they live, and end. The new ones run their constructor with the same arguments, and
        `on_restart`, which gets what the old one has handed over. With `restart_scope="group"` the other workers are
        restarted too. A worker that is busy until the timeout is ended without a handover. A replacement does not count
        as a restart.

        Args:
            ranks: the ranks.
            timeout: the seconds that the preparation and the calls before may take; None for `start_timeout_s`.

        Returns:
            The epoch of the group.

        Raises:
            TypeError, ValueError, IndexError: wrong ranks, tied groups, ranks that differ in what they need before they
                start, or too few standbys and free slots. Nothing has changed, as with the next two.
            WorkerStartError: a new process did not start.
            ResizeTimeoutError: another change of the group, or calls being sent, took longer than `timeout`.
            WorkerFailureError: a new worker failed. Its rank is lost; `restart_failed_workers()` starts it again.
            WorkerGroupError: the group, or its Ray, has been shut down.
            Exception: what `on_handover` raised. Nothing has changed.
        """
        return self._replacer.replace(list(ranks), check_timeout("timeout", timeout))

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End the workers and the processes that they have started, rank 0 last, and release everything.

        Waits until all these processes are gone. The processes that a worker has started get SIGTERM when the worker is
        gone, and SIGKILL 2 s later. You can call it again, also from several threads at once: the cleanup runs once,
        and all calls return the same value. It is safe when workers are dead or hung, and when Ray is down.

        Args:
            cleanup_method: a method that every living worker runs first.
            timeout: the seconds for all cleanups together, also for a cleanup of another thread; None for no limit.
            force: run no cleanup, and end the workers during the cleanup of another thread.

        Returns:
            Whether everything succeeded; failures are logged.
        """
        if self._shut is not None:
            return self._shut
        # A restart of another thread sees it, and releases what it has started.
        self._roster.begin_end()
        for watch in list(self._watches):
            watch.close()
        limit = 0.0 if force else -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if self._cleaning.acquire(timeout=limit):
            try:
                if self._shut is None:
                    self._shut = self._clean_up_and_end(None if force else cleanup_method, timeout)
            finally:
                self._cleaning.release()
            return self._shut
        # Another thread is in its cleanup, which fails as soon as its workers are gone.
        self._end_workers()
        if self._cleaning.acquire(timeout=CLEANED_S):
            self._cleaning.release()
        return bool(self._shut)

    def _clean_up_and_end(self, cleanup_method: str | None, timeout: float | None) -> bool:
        clean = True
        try:
            now = self._roster.snapshot()
            if cleanup_method is not None and self.workers and self._roster.connected:
                dead = find_dead(now)
                living = {member.rank: member.handle for member in now.members if member.rank not in dead}
                with self._roster.direct(living):
                    requests = request_cleanup(living, cleanup_method)
                clean = wait_for_cleanup(requests, cleanup_method, timeout)
        finally:
            self._end_workers()
        return clean and self._resources.gave_all_back

    def _end_workers(self) -> None:
        self._roster.end()
        self._launcher.release()
        self._resources.give_back()

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayWorkerGroup belongs to the process that made it; send its `handle()` instead")


def _read_timeline(resources: Resources) -> Timeline:
    return read_timeline(find_own_group(resources.registration))


def _user_methods(
    on_restart: str | None, on_resize: str | None, on_handover: str | None, timeout_s: float, sender: Sender
) -> UserMethods:
    """Return what runs the methods of a group that its membership changes call."""

    def send(method: str, ranks: Sequence[int], args: Sequence[Column] = (), *, discard: bool = True) -> Execution:
        options = CallOptions(timeout=timeout_s, discard=discard)
        recipients = Recipients(list(ranks), [] if discard else list(ranks), [not discard] * len(ranks))
        # The calls that wait do so for this change, so this one must not wait behind them.
        return dispatch(sender, None, method, recipients, args, {}, options, may_wait=False)

    def run_on_restart(ranks: Sequence[int], values: Mapping[int, Any]) -> None:
        if on_restart is None:
            return
        given = [rank for rank in ranks if rank in values]
        if rest := [rank for rank in ranks if rank not in values]:
            send(on_restart, rest).result()
        if given:
            send(on_restart, given, [Column([values[rank] for rank in given], range(len(given)))]).result()

    def send_on_resize(ranks: Sequence[int]) -> dict[int, Any]:
        if on_resize is None:
            return {}
        call = send(on_resize, ranks)
        return dict(zip(call.ranks, call.completions.values(), strict=True))

    def run_on_handover(ranks: Sequence[int]) -> dict[int, Any]:
        if on_handover is None or not ranks:
            return {}
        call = send(on_handover, ranks, discard=False)
        call.result()
        return dict(zip(call.ranks, call.futures, strict=True))

    return UserMethods(run_on_restart, send_on_resize, run_on_handover)


def _check_sharding(given: NamedSharding | None, world_size: int) -> NamedSharding:
    if given is None:
        return NamedSharding.from_shape(worker=world_size)
    if not isinstance(given, NamedSharding):
        raise TypeError(f"sharding_annotations must be a NamedSharding, got {type(given).__name__}")
    if given.size != world_size:
        raise ValueError(f"sharding_annotations has {given.size} ranks {given.shape}, the group {world_size} workers")
    if sorted(given.layout.ravel().tolist()) != list(range(world_size)):
        raise ValueError(f"sharding_annotations must hold the ranks 0 to {world_size - 1}, got {given!r}")
    return given
