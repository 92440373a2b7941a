# SPDX-License-Identifier: Apache-2.0
"""A group of workers: one process per slot, called by rank or along named axes."""

import dataclasses
import math
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, NoReturn

from fairlead_placement import RayVirtualCluster, Slot, lease_ports
from fairlead_placement.spi import claim_slots, release_when_dropped
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from ._arguments import Arguments
from ._builder import ClassLike, RayWorkerBuilder
from ._calls.classic import ClassicCalls
from ._calls.line import Line
from ._calls.map import Strategy, check_strategy
from ._calls.plan import Mesh
from ._calls.sender import Dispatching
from ._calls.sources import register
from ._calls.statistics import GroupStatistics
from ._calls.view import Addressed
from ._compression import Compression, check_compression
from ._deadline import check_timeout
from ._display import table_html
from ._lifecycle.resources import Held
from ._lifecycle.restart import check_max_restarts, check_scope, restart
from ._lifecycle.shutdown import WorkerProcess, clean_up
from ._observe.failures import WorkerFacts
from ._observe.memory import guard, parse_memory
from ._observe.observer import Watched
from ._observe.watch import Watch
from ._ray_private import actor_id_of, dead_actors
from ._remote.process import mark_of
from ._start.environment import check_env_vars, start_variables
from ._start.launch import WorkerPlan, create, plan_workers, wait_started
from ._start.layout import lay_out
from ._start.options import recursive_merge_options
from ._start.python import chosen_python, ready_python
from ._start.recipe import recipe_of
from ._start.worker_class import describe_class
from .exceptions import WorkerFailure

__all__ = ["RayWorkerGroup"]

# How long the shutdown of another thread may take once its workers are gone: it waits for nothing any more.
CLEANED_S = 10.0


class RayWorkerGroup(Dispatching, ClassicCalls, Addressed, Watched):
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
        workers: the actor handles, by rank: `group.workers[0].step.remote(x)`.
        worker_metadata: a dict per worker; empty after `shutdown`.
        name_prefix: the first part of the workers' names; the class's name if none was given.
        world_size: how many workers there are.
        master_address: of the node of rank 0, where the workers' process group has its store.
        master_port: the port that was leased there for it.
    """

    master_address: str
    master_port: int

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
        self._call_timeout_s = check_timeout("call_timeout_s", call_timeout_s)
        self._submitted: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._load_balancing_strategy = check_strategy(load_balancing_strategy)
        self._enable_load_balancing = enable_load_balancing
        self._gradient_compression = check_compression(enable_gradient_compression)
        self._restart_on_failure = restart_on_failure
        self._max_restarts = check_max_restarts(max_restarts)
        self._restart_scope = check_scope(restart_scope)
        self._memory_limit = None if memory_limit is None else parse_memory(memory_limit)
        self._start_timeout_s = float(start_timeout_s)
        self._slots = cluster.slots() if isinstance(cluster, RayVirtualCluster) else tuple(cluster)
        self.name_prefix: str = name_prefix or builder.ray_actor_class_fqn.rpartition(".")[2]
        self._places = lay_out(
            self._slots,
            prefix=self.name_prefix,
            workers_per_node=workers_per_node,
            bundle_indices_list=bundle_indices_list,
        )
        self.cluster = cluster
        self.world_size: int = len(self._places)
        self.sharding_annotations: NamedSharding = _sharding(sharding_annotations, self.world_size)
        self.workers: list[Any] = []
        self.worker_metadata: list[dict[str, Any]] = []
        self._mesh = Mesh(self.sharding_annotations)
        self._coords = [self.sharding_annotations.get_worker_coords(rank) for rank in range(self.world_size)]
        # Long enough that no other group on a node has the same: what carries it is ended with the group.
        self._token = uuid.uuid4().hex
        self._id = self._token[:6]
        self._env_vars = env_vars
        self._python = chosen_python(python, builder.ray_actor_class_fqn)
        self._lock = threading.Lock()
        # Reentrant: a restart calls `on_restart` while it keeps other calls out.
        self._submitting = threading.RLock()
        self._line = Line()
        self._counts = GroupStatistics()
        # By actor: also of those that have been replaced, for what they still answer. By rank: of those there are.
        self._facts: dict[str, WorkerFacts] = {}
        self._workers_now: list[WorkerFacts] = []
        self._lost: dict[int, WorkerFailure] = {}
        self._restarting: set[int] = set()
        # The restart on a thread of its own that calls with a deadline wait for, and when any restart began.
        self._restart: Future[list[int]] | None = None
        self._restart_began: float | None = None
        self._incarnations = [0] * self.world_size
        self._restarts = [0] * self.world_size
        self._group_restarts = 0
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        # Held by the thread that runs the cleanup. Reentrant: a signal's handler may shut down in the middle of it.
        self._cleaning = threading.RLock()
        self._ending = False
        self._shut: bool | None = None

        self._held = Held(claim=claim_slots([place.slot for place in self._places], self.name_prefix, group=self))
        register(self)
        release_when_dropped(self, self._held.leak, self._held.give_back)
        try:
            self._worker = builder.worker
            self._concurrent = async_communication
            self._plan()
            self._on_restart = None if on_restart is None else self._class.method(on_restart).name
            facts = {
                "communication_backend": getattr(cluster, "communication_backend", None),
                "gradient_compression": self._gradient_compression,
            }
            recipe = recipe_of(builder, self._class, self.sharding_annotations, facts, token=self._token)
            self._held.recipe = recipe
            self._count(puts=recipe.stored.puts, bytes_put=recipe.stored.bytes_put)
            self._bring_up(range(self.world_size))
        except BaseException:
            self.shutdown(force=True)
            raise

    def _plan(self) -> None:
        """Look at the class where the workers are to be, and plan how each is made."""
        nodes = [place.slot.node_id for place in self._places]
        python = ready_python(self._python, nodes, timeout_s=self._start_timeout_s)
        per_node = getattr(self.cluster, "num_gpus_per_node", None)
        # The class may only be found, or its libraries loaded, with these.
        variables = start_variables(self._env_vars)
        runtime_env = recursive_merge_options(python.runtime_env, {"env_vars": variables} if variables else {})
        self._class = describe_class(
            self._worker,
            asks=[place.configure_ask(per_node) for place in self._places],
            node_id=nodes[0],
            runtime_env=runtime_env,
            timeout_s=self._start_timeout_s,
            concurrent=self._concurrent,
        )
        self._plans = plan_workers(
            self._places, self._class, coords=self._coords, env_vars=self._env_vars, python=python
        )

    def _bring_up(self, ranks: Sequence[int]) -> None:
        """Start the workers of these ranks, and wait until every constructor has finished."""
        recipe = self._held.recipe
        if recipe is None:
            raise self._has_ended()
        plans = [self._plans[rank] for rank in ranks]
        actors = create(plans, self._class, self._id, self._incarnations)
        self._held.workers.update(zip(ranks, actors, strict=True))
        for plan in plans:
            place = plan.place
            self._held.processes[place.rank] = WorkerProcess(place.slot.node_id, mark_of(self._token, place.rank))
        # The agent that holds the port starts while the workers' processes do.
        if self._held.lease is None:
            ports = self.cluster.port_range if isinstance(self.cluster, RayVirtualCluster) else None
            ((self._held.lease,),) = lease_ports([self._places[0].slot], **_bounds(ports))
        lease = self._held.lease
        self.master_address, self.master_port = lease.address, lease.port

        configured = Arguments()
        started = [
            recipe.start(
                actor,
                plan,
                incarnation=self._incarnations[plan.place.rank],
                master_port=lease.port,
                configured=configured,
            )
            for plan, actor in zip(plans, actors, strict=True)
        ]
        self._count(requests=len(started), puts=configured.puts, bytes_put=configured.bytes_put)
        answers = wait_started(started, plans, name=self.name_prefix, timeout_s=self._start_timeout_s)
        self._know(plans, actors, answers)
        if self._memory_limit is not None:
            guard(self._token, [self._workers_now[rank] for rank in ranks], self._memory_limit)

    def _know(self, plans: Sequence[WorkerPlan], actors: Sequence[Any], answers: Sequence[Mapping[str, Any]]) -> None:
        """Note who the workers are that have just started."""
        if self._ending:
            raise self._has_ended()
        if not self.workers:
            self.workers = list(actors)
            self.worker_metadata = [place.metadata() for place in self._places]
            self._workers_now = [plan.facts for plan in plans]
        with self._lock:
            for plan, actor, answer in zip(plans, actors, answers, strict=True):
                rank = plan.place.rank
                who = dataclasses.replace(plan.facts, pid=answer["pid"], started=answer["started"])
                self._facts[actor_id_of(actor)] = self._workers_now[rank] = who
                mark = mark_of(self._token, rank)
                self._held.processes[rank] = WorkerProcess(answer["node_id"], mark, who.pid, who.started)
                self.workers[rank] = actor
                self.worker_metadata[rank] = plan.place.metadata()
                self._lost.pop(rank, None)

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
        with self._submitting:
            self._restart_began = time.monotonic()
            try:
                return restart(self)
            finally:
                self._restart_began = None

    def _master_moved(self) -> bool:
        lease = self._held.lease
        return lease is not None and lease.node_id != self._places[0].slot.node_id

    def __repr__(self) -> str:
        state = f"{self.world_size} workers" if self.workers else "shut down"
        return f"RayWorkerGroup({self.name_prefix!r}, {self.sharding_annotations.shape}, {state})"

    def _repr_html_(self) -> str:
        shown = ("global_rank", "name", "state", "node_idx", "node_id")
        rows = [
            (*(worker[key] for key in shown), self._coords[worker["global_rank"]]) for worker in self.worker_metadata
        ]
        return table_html(repr(self), (*shown, "coords"), rows)

    @property
    def dp_size(self) -> int:
        """How many tied groups there are."""
        return self._places[-1].tied_group + 1

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The rank of the first worker of each tied group."""
        return [place.rank for place in self._places if place.tied_rank == 0]

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """The rank of the first worker of a tied group.

        Raises:
            IndexError: there is no such group.
        """
        leaders = self.dp_leader_worker_indices
        if not 0 <= dp_shard_idx < len(leaders):
            raise IndexError(f"dp_shard_idx {dp_shard_idx} is out of range: valid are 0 to {len(leaders) - 1}")
        return leaders[dp_shard_idx]

    def statistics(self) -> GroupStatistics:
        """What has been stored, sent and fetched so far."""
        return self._counts

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
        self._ending = True
        self._end_watches()
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
            workers = list(self.workers)
            if cleanup_method is not None and workers and self._held.connected:
                with self._lock:
                    facts, lost = dict(self._facts), set(self._lost)
                dead = dead_actors()
                living = {
                    who.rank: workers[who.rank]
                    for actor, who in facts.items()
                    if actor not in dead and who.rank not in lost and self._workers_now[who.rank] is who
                }
                clean = clean_up(living, cleanup_method, timeout)
        finally:
            self._end_workers()
        return clean and self._held.gave_all_back

    def _end_workers(self) -> None:
        self.workers = []
        self.worker_metadata = []
        self._held.give_back()

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayWorkerGroup belongs to its driver; send the handles in its `workers` instead")


def _bounds(ports: tuple[int, int] | None) -> dict[str, int]:
    return {} if ports is None else {"low": ports[0], "high": ports[1]}


def _sharding(given: NamedSharding | None, world_size: int) -> NamedSharding:
    if given is None:
        return NamedSharding.from_shape(worker=world_size)
    if not isinstance(given, NamedSharding):
        raise TypeError(f"sharding_annotations must be a NamedSharding, got {type(given).__name__}")
    if given.size != world_size:
        raise ValueError(f"sharding_annotations has {given.size} ranks {given.shape}, the group {world_size} workers")
    if sorted(given.layout.ravel().tolist()) != list(range(world_size)):
        raise ValueError(f"sharding_annotations must hold the ranks 0 to {world_size - 1}, got {given!r}")
    return given
