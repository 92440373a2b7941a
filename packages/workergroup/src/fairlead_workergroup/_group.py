# SPDX-License-Identifier: Apache-2.0
"""A group of workers: one process per slot, called by rank or along named axes."""

import math
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_placement.spi import release_when_dropped
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from ._builder import ClassLike, RayWorkerBuilder
from ._calls.call import dispatch
from ._calls.classic import ClassicCalls
from ._calls.map import Strategy, check_strategy
from ._calls.plan import CallOptions, Mesh, Recipients
from ._calls.results import ClassicFutures
from ._calls.sender import Sender
from ._calls.view import Balancing, Target, TypedCalls
from ._context import Compression, check_compression
from ._deadline import check_timeout
from ._display import table_html
from ._lifecycle.launcher import Launcher
from ._lifecycle.resources import Resources
from ._lifecycle.restart import Restarter, check_restart_policy
from ._lifecycle.shutdown import clean_up
from ._members import Roster
from ._observe.failures import Verdicts
from ._observe.memory import MemoryLimit, parse_memory
from ._observe.observer import STUCK_AFTER_S, Observer
from ._observe.statistics import Counters, GroupStatistics
from ._observe.status import StuckWorker, WorkerEvent, WorkerStatus, WorkerUsage
from ._observe.watch import Watch
from ._ray_private import actor_id_of, dead_actors
from ._start.environment import check_env_vars, choose_python
from ._start.layout import lay_out

# How long the shutdown of another thread may take once its workers are gone: it waits for nothing any more.
CLEANED_S = 10.0


class RayWorkerGroup(TypedCalls, ClassicCalls):
    """A process per slot, all made from one class, addressed by rank or along named axes.

    Args:
        cluster: where the workers live: a `RayVirtualCluster` (reserved here if it is not), or slots.
        remote_worker_builder: a `RayWorkerBuilder`, or a class or its full name, which is then constructed without
            arguments.
        workers_per_node: workers on each logical node: None for one per slot, a number, or a list with a number
            for each logical node in use.
        name_prefix: the first part of the workers' names; the class's name if empty.
        bundle_indices_list: instead: `(node_idx, [Ray's bundle indices])` of each *tied group*, workers that share one
            model copy.
        sharding_annotations: the axes over the ranks; one axis `worker` if None.
        env_vars: variables of the workers. The driver's environment is not copied to them.
        python: what workers run in: a `VenvSpec` or a uv command, built on their nodes where it is not there yet; the
            path of an interpreter that all nodes have; None: what is registered for the class (`actor_environments` of
            fairlead-venvs), else this one's own. It must have the cluster's version of Ray, and needs nothing else of
            ours.
        restart_on_failure: start lost workers again before the next call that reaches one of them. The call that met
            the loss raises all the same, unless it was made with `retries`.
        max_restarts: how often: each rank, or with scope "group" the group.
        restart_scope: "worker": only what is lost; "group": all workers, with a new master port, which is what
            collectives need. With `restart_on_failure` and "group", every call restarts them while a worker is lost.
        on_restart: a method of the class, without arguments, that restarted workers run first, such as one that reloads
            a checkpoint.
        memory_limit: bytes, or "8GB" or "512MiB", of memory that a worker and the processes it has started may hold
            together, once its constructor has finished, before all of them are ended, with kind "out-of-memory". Files
            and shared memory do not count, nor do the values of the object store.
        async_communication: async methods of a worker overlap, on one event loop, which its other methods block.
            Otherwise a worker runs one method at a time.
        enable_load_balancing: what `map` has given to a worker that dies goes to the others.
        load_balancing_strategy: who gets the next item of `map`: "round_robin", "least_loaded", or a function of the
            number of items each worker has now, that returns which of them.
        enable_gradient_compression: what `fairlead_workergroup.torch.wrap_ddp` uses in the workers: True or "fp16",
            "bf16", "powersgd", or False for none.
        call_timeout_s: seconds that a `call` may take when it says nothing else; None: no limit.
        start_timeout_s: seconds that all constructors together may take.

    Raises:
        TypeError, ValueError: a bad argument; nothing has been launched.
        ResourceInsufficientError, PlacementTimeoutError: the cluster could not be reserved, or has no room for another
            group.
        WorkerStartError: a worker did not start. All of them have been ended.

    The constructor returns when every worker's `__init__` has finished. Use the group as a context manager, or call
    `shutdown`.

    Attributes:
        cluster: as given.
        name_prefix: the first part of the workers' names; the class's name if none was given.
        world_size: how many workers there are.
        sharding_annotations: the axes over the ranks.
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
        memory_limit: int | str | None = None,
        async_communication: bool = False,
        enable_load_balancing: bool = False,
        load_balancing_strategy: Strategy = "round_robin",
        enable_gradient_compression: bool | Compression = False,
        call_timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        given = remote_worker_builder
        builder = given if isinstance(given, RayWorkerBuilder) else RayWorkerBuilder(given)
        env_vars = dict(env_vars or {})
        check_env_vars(env_vars)
        if not 0 < start_timeout_s < math.inf:
            raise ValueError(f"start_timeout_s must be positive and finite, got {start_timeout_s!r}")
        call_timeout_s = check_timeout("call_timeout_s", call_timeout_s)
        self._balancing = Balancing(check_strategy(load_balancing_strategy), enable_load_balancing)
        compression = check_compression(enable_gradient_compression)
        policy = check_restart_policy(restart_on_failure, max_restarts, restart_scope)
        # Long enough that no other group on a node has the same: what carries it is ended with the group.
        token = uuid.uuid4().hex
        limit = None if memory_limit is None else MemoryLimit(token, parse_memory(memory_limit))
        slots = cluster.slots() if isinstance(cluster, RayVirtualCluster) else tuple(cluster)
        self.name_prefix: str = name_prefix or builder.ray_actor_class_fqn.rpartition(".")[2]
        places = lay_out(
            slots,
            prefix=self.name_prefix,
            workers_per_node=workers_per_node,
            bundle_indices_list=bundle_indices_list,
        )
        self.cluster = cluster
        self.world_size: int = len(places)
        self.sharding_annotations: NamedSharding = _check_sharding(sharding_annotations, self.world_size)
        self._mesh = Mesh(self.sharding_annotations)
        self._roster = Roster(self.name_prefix, places, self.sharding_annotations)
        self._resources = Resources(self._roster)
        self._counters = Counters()
        self._observer = Observer(self._roster)
        self._verdicts = Verdicts(self._roster, limit)
        self._launcher = Launcher(
            self._roster,
            self._resources,
            self._counters,
            cluster=cluster,
            worker=builder.worker,
            python=choose_python(python, builder.ray_actor_class_fqn),
            env_vars=env_vars,
            memory_limit=limit,
            token=token,
            concurrent=async_communication,
            timeout_s=float(start_timeout_s),
        )
        restarter = Restarter(
            self._roster, self._resources, self._launcher, self._verdicts, policy, cluster=cluster, slots=slots
        )
        self._sender = Sender(
            self._roster,
            self._launcher,
            restarter,
            self._verdicts,
            self._counters,
            call_timeout_s=call_timeout_s,
            after_restart=partial(_run_after_restart, on_restart, float(start_timeout_s)),
        )
        self._futures = ClassicFutures(self._sender)
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        # Held by the thread that runs the cleanup. Reentrant: a signal's handler may shut down in the middle of it.
        self._cleaning = threading.RLock()
        self._shut: bool | None = None

        self._resources.claim_slots(places)
        release_when_dropped(self, self._resources.leak, self._resources.give_back)
        try:
            self._launcher.prepare(places)
            if on_restart is not None:
                self._sender.method(on_restart)
            facts = {
                "communication_backend": getattr(cluster, "communication_backend", None),
                "gradient_compression": compression,
            }
            self._launcher.store(builder.args, builder.kwargs, sharding=self.sharding_annotations, facts=facts)
            self._launcher.start(range(self.world_size))
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
        """The actor handles, by rank: `group.workers[0].step.remote(x)`; empty after `shutdown`."""
        return self._roster.handles

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """A dict per worker; empty after `shutdown`."""
        return self._roster.worker_metadata

    @property
    def master_address(self) -> str:
        """The address of the node of rank 0, where the workers' process group has its store."""
        return self._launcher.master[0]

    @property
    def master_port(self) -> int:
        """The port that was leased there for it."""
        return self._launcher.master[1]

    @property
    def _target(self) -> Target:
        # It is not stored: it refers to the group, which must be released when its last reference is.
        return Target(self._sender, self, self._mesh, self._balancing)

    @property
    def _classic_futures(self) -> ClassicFutures:
        return self._futures

    @property
    def dp_size(self) -> int:
        """The number of tied groups; compatible with the original system."""
        return self._roster.snapshot().places[-1].tied_group + 1

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The rank of the first worker of each tied group; compatible with the original system."""
        return [place.rank for place in self._roster.snapshot().places if place.tied_rank == 0]

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the rank of the first worker of a tied group; compatible with the original system.

        Raises:
            IndexError: there is no such group.
        """
        leaders = self.dp_leader_worker_indices
        if not 0 <= dp_shard_idx < len(leaders):
            raise IndexError(f"dp_shard_idx {dp_shard_idx} is out of range: valid are 0 to {len(leaders) - 1}")
        return leaders[dp_shard_idx]

    def statistics(self) -> GroupStatistics:
        """Return the counts of what has been stored, sent and fetched so far."""
        return self._counters.now

    def get_worker_status(self, *, stuck_after_s: float = STUCK_AFTER_S) -> list[WorkerStatus]:
        """Return what each worker is doing, by rank; `worker_metadata` and the cluster's grid then show the states.

        The workers are not asked: their records are read on their nodes, one request a node, so that it works while
        they are busy or hang. Who is dead is known from Ray.

        Args:
            stuck_after_s: a busy worker without progress for so many seconds is "stuck".

        Raises:
            ValueError: `stuck_after_s` is not a positive number.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._observer.read_status(stuck_after_s)

    def get_resource_usage(self) -> list[WorkerUsage]:
        """Return what the workers' processes use, by rank, measured on their nodes: one request a node.

        Left out are workers whose process is gone, or whose node does not answer.

        Raises:
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._observer.read_usage()

    def detect_stuck_workers(self, timeout_s: float = STUCK_AFTER_S, dump_stacks: bool = True) -> list[StuckWorker]:
        """Return the living workers without progress for `timeout_s` seconds, whether they are busy or stopped.

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
        return self._observer.find_stuck(timeout_s, dump_stacks=dump_stacks)

    def watch(
        self,
        interval_s: float = 5.0,
        stuck_after_s: float = STUCK_AFTER_S,
        on_event: Callable[[WorkerEvent], object] | None = None,
        *,
        slow_after_s: float = 60.0,
    ) -> Watch:
        """Look at the workers in the background, and report each event of a worker once.

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

    def restart_failed_workers(self) -> list[int]:
        """Start the workers that are dead again: the same ranks with the same arguments, incarnation + 1.

        In the same slot; where its node is gone, in the one the cluster's `replace_lost_nodes` gives for it. With
        `restart_scope="group"` all workers are ended and started, with a new master port. Then `on_restart` runs on
        those that were started. Calls of other threads wait meanwhile.

        Returns:
            The ranks that were started; none if nothing is dead.

        Raises:
            WorkerFailureError: `max_restarts` is used up, there is no slot, or a worker did not start (kind
                "start-failed"). What is dead stays dead, and can be tried again.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._sender.restart()

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End the workers and the processes they have started, rank 0 last, and give back everything the group held.

        Waits until all these processes are gone. What a worker has started gets SIGTERM when the worker is gone, and
        SIGKILL 2 s later. Can be repeated, also by several threads at once: the cleanup runs
        once, and all of them return the same. Safe when workers are dead or hung, and when Ray is down.

        Args:
            cleanup_method: a method that every living worker runs first.
            timeout: seconds for all cleanups together, also for one that another thread has started; None: no limit.
            force: no cleanup; the workers are ended in the middle of one that another thread has started.

        Returns:
            Whether all went well; what did not is logged.
        """
        if self._shut is not None:
            return self._shut
        # A restart that another thread has under way sees it, and gives back what it had started.
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
                dead = dead_actors()
                living = {
                    member.rank: member.handle
                    for member in now.members
                    if member.failure is None and actor_id_of(member.handle) not in dead
                }
                clean = clean_up(living, cleanup_method, timeout)
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
        raise TypeError("a RayWorkerGroup belongs to its driver; send the handles in its `workers` instead")


def _run_after_restart(method: str | None, timeout_s: float, sender: Sender, ranks: list[int]) -> None:
    """Run the `on_restart` method of a group on restarted ranks, and wait for it."""
    if method is None:
        return
    options = CallOptions(timeout=timeout_s, discard=True)
    recipients = Recipients(ranks, [], [False] * len(ranks))
    # The calls that wait do so for this restart, so this one must not wait behind them.
    dispatch(sender, None, method, recipients, [], {}, options, may_wait=False).result()


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
