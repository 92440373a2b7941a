# SPDX-License-Identifier: Apache-2.0
"""A group of workers: one process per slot, called by rank or along named axes."""

import dataclasses
import math
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import ray
from ray import ObjectRef

from fairlead_placement import RayVirtualCluster, Slot, claim_slots, lease_ports
from fairlead_sharding import NamedSharding

from ._arguments import Arguments
from ._builder import RayWorkerBuilder
from ._call import Call
from ._classic import ClassicCalls
from ._compression import check_compression
from ._deadline import check_timeout
from ._environment import check_env_vars
from ._failures import WorkerFacts
from ._held import Held, forgotten
from ._inspect import cancelled, late_workers
from ._map import Strategy, check_strategy
from ._places import lay_out
from ._planning import Column, Mesh
from ._ray_private import actor_id_of, dead_actors, object_sizes
from ._shutdown import clean_up
from ._start import WorkerPlan, create, plan_workers, wait_started
from ._statistics import GroupStatistics
from ._submit import submit
from ._view import Addressed
from ._watch import Watch
from ._watching import Watched
from ._worker_class import check_python, describe_class
from .exceptions import LateWorker, WorkerFailure, WorkerFailureError, WorkerGroupError

__all__ = ["RayWorkerGroup"]


class RayWorkerGroup(ClassicCalls, Addressed, Watched):
    """A process per slot, all made from one class, addressed by rank or along named axes.

    Args:
        cluster: where the workers live: a `RayVirtualCluster` (reserved here if it is not), or slots.
        worker: a `RayWorkerBuilder`, or a class or its full name, which is then made without arguments.
        workers_per_node: workers on each logical node: None for one per slot, a number, or a list with a number
            for each logical node in use.
        name_prefix: first part of the workers' names; the class's name if empty.
        bundle_indices_list: instead: `(node_idx, [Ray's bundle indices])` of each *tied group*, workers that share one
            model copy.
        sharding_annotations: the axes over the ranks; one axis `worker` if None.
        env_vars: variables of the workers. The driver's environment is not copied to them.
        python: path of the interpreter that workers run, equal on all nodes; this one's if None. It must have the
            cluster's version of Ray, and needs nothing else of ours.
        async_communication: async methods of a worker overlap, on one event loop, which its other methods block.
            Otherwise a worker runs one method at a time.
        enable_load_balancing: what `map` has given to a worker that dies goes to the others.
        load_balancing_strategy: who gets the next item of `map`: "round_robin", "least_loaded", or a function of the
            number of items each worker has now, that returns which of them.
        enable_gradient_compression: what `fairlead_workergroup.torch.wrap_ddp` uses in the workers: True or "fp16",
            "bf16", "powersgd", or False for none.
        call_timeout_s: seconds that a `call` may take when it says nothing else; None: no limit.
        start_timeout_s: how long all constructors together may take.

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
    """

    def __init__(
        self,
        cluster: RayVirtualCluster | Sequence[Slot],
        worker: Any,
        /,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        python: str | None = None,
        async_communication: bool = False,
        enable_load_balancing: bool = False,
        load_balancing_strategy: Strategy = "round_robin",
        enable_gradient_compression: bool | str = False,
        call_timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        builder = worker if isinstance(worker, RayWorkerBuilder) else RayWorkerBuilder(worker)
        env_vars = dict(env_vars or {})
        check_env_vars(env_vars)
        if not 0 < start_timeout_s < math.inf:
            raise ValueError(f"start_timeout_s must be positive and finite, got {start_timeout_s!r}")
        self._call_timeout_s = check_timeout("call_timeout_s", call_timeout_s)
        self._load_balancing_strategy = check_strategy(load_balancing_strategy)
        self._enable_load_balancing = enable_load_balancing
        self._gradient_compression = check_compression(enable_gradient_compression)
        slots = cluster.slots() if isinstance(cluster, RayVirtualCluster) else tuple(cluster)
        prefix = name_prefix or builder.ray_actor_class_fqn.rpartition(".")[2]
        places = lay_out(
            slots,
            prefix=prefix,
            workers_per_node=workers_per_node,
            bundle_indices_list=bundle_indices_list,
        )
        self.cluster = cluster
        self.name_prefix = name_prefix
        self.sharding_annotations = _sharding(sharding_annotations, len(places))
        self._mesh = Mesh(self.sharding_annotations)
        self.world_size = len(places)
        self.workers: list[Any] = []
        self.worker_metadata: list[dict[str, Any]] = []
        self._places = places
        self._coords = [self.sharding_annotations.get_worker_coords(rank) for rank in range(len(places))]
        self._id = uuid.uuid4().hex[:6]
        self._lock = threading.Lock()
        self._submitting = threading.Lock()
        self._counts = GroupStatistics()
        # By actor: also of those that have been replaced, for what they still answer. By rank: of those there are.
        self._facts: dict[str, WorkerFacts] = {}
        self._workers_now: list[WorkerFacts] = []
        self._lost: dict[int, WorkerFailure] = {}
        self._restarting: set[int] = set()
        self._incarnations = [0] * self.world_size
        self._restarts = [0] * self.world_size
        self._watches: list[Watch] = []
        self._shut: bool | None = None

        self._held = Held(claim=claim_slots([place.slot for place in places], prefix, group=self))
        self._finalizer = weakref.finalize(self, forgotten, self._held)
        try:
            nodes = [place.slot.node_id for place in places]
            if python is not None:
                check_python(python, nodes, timeout_s=start_timeout_s)
            self._class = describe_class(
                builder.worker,
                asks=[place.configure_ask(getattr(cluster, "num_gpus_per_node", None)) for place in places],
                node_id=nodes[0],
                runtime_env={"py_executable": python} if python is not None else None,
                timeout_s=start_timeout_s,
                concurrent=async_communication,
            )
            plans = plan_workers(places, self._class, coords=self._coords, env_vars=env_vars, python=python)
            self._start(plans, builder, start_timeout_s)
        except BaseException:
            self.shutdown(force=True)
            raise

    def _start(self, plans: Sequence[WorkerPlan], builder: RayWorkerBuilder, timeout_s: float) -> None:
        self._held.workers = create(plans, self._class, self._id)
        # The agent that holds the port starts while the workers' processes do.
        first = [plans[0].place.slot]
        if isinstance(self.cluster, RayVirtualCluster):
            low, high = self.cluster.port_range
            ((self._held.lease,),) = lease_ports(first, low=low, high=high)
        else:
            ((self._held.lease,),) = lease_ports(first)
        self.master_address, self.master_port = self._held.lease.address, self._held.lease.port

        arguments = Arguments()
        args = [arguments.prepared(value) for value in builder.args]
        target = arguments.prepared(self._class.target)
        layout = self.sharding_annotations.to_dict()
        if "ranks" in layout:  # as many as there are workers: stored once, not sent to each
            layout = arguments.prepared(layout)
        started = []
        for plan, actor in zip(plans, self._held.workers, strict=True):
            kwargs = {n: arguments.prepared(v) for n, v in {**builder.kwargs, **plan.init_kwargs}.items()}
            facts = {
                "rank": plan.place.rank,
                "world_size": self.world_size,
                "name": plan.place.name,
                "coords": dict(plan.coords),
                "incarnation": 0,
                "communication_backend": getattr(self.cluster, "communication_backend", None),
                "gradient_compression": self._gradient_compression,
                "layout": layout,
                "env": {**plan.environment.variables, "MASTER_PORT": str(self.master_port)},
                "path": list(plan.environment.path),
            }
            # Nested, so that Ray leaves the references alone: the host fetches them once the environment is set.
            started.append(actor._fairlead_start.remote(facts, [target], args, kwargs))
        # Kept for as long as the group: a worker that starts again needs them.
        self._held.constants = arguments.refs
        self._count(requests=len(started), puts=arguments.puts, bytes_put=arguments.bytes_put)

        answers = wait_started(started, plans, name=self.name_prefix or self._class.name, timeout_s=timeout_s)
        self._held.processes = [(a["node_id"], a["pid"], a["started"]) for a in answers]
        self.workers = list(self._held.workers)
        self.worker_metadata = [place.metadata() for place in self._places]
        for plan, answer, actor in zip(plans, answers, self.workers, strict=True):
            who = dataclasses.replace(plan.facts, pid=answer["pid"], started=answer["started"])
            self._facts[actor_id_of(actor)] = who
            self._workers_now.append(who)

    def __repr__(self) -> str:
        state = f"{self.world_size} workers" if self.workers else "shut down"
        return f"RayWorkerGroup({self.name_prefix!r}, {self.sharding_annotations.shape}, {state})"

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

    @property
    def _of_group(self) -> "RayWorkerGroup":
        return self

    def _dispatch(
        self,
        method: str,
        called: list[int],
        args: Sequence[Column],
        kwargs: Mapping[str, Column],
        *,
        returned: list[int],
        answers: list[bool] | None = None,
        timeout_s: float | None = None,
        single: bool = False,
        discard: bool = False,
    ) -> Call:
        began = time.monotonic()
        if not self.workers:
            raise WorkerGroupError(f"{self!r}: it has been shut down; make a new group")
        found = self._class.method(method)
        if self._lost and (lost := tuple(self._lost[rank] for rank in called if rank in self._lost)):
            raise WorkerFailureError(lost)
        with self._submitting:  # calls of several threads do not interleave on their way to the workers
            futures, stored = submit([self.workers[rank] for rank in called], found, args, kwargs, answers=answers)
        puts, bytes_put = stored.puts, stored.bytes_put
        self._count(calls=1, requests=len(futures), puts=puts, bytes_put=bytes_put)
        return Call(
            futures,
            called,
            returned,
            group=self,
            method=found,
            began=began,
            timeout_s=self._call_timeout_s if timeout_s is None else timeout_s,
            single=single,
            discard=discard,
            puts=puts,
            bytes_put=bytes_put,
        )

    def _count(self, **more: int) -> None:
        with self._lock:
            counts = {name: getattr(self._counts, name) + amount for name, amount in more.items()}
            self._counts = dataclasses.replace(self._counts, **counts)

    def _count_fetched(self, refs: Sequence[ObjectRef]) -> int:
        size = sum(object_sizes(refs))
        self._count(fetched=len(refs), bytes_fetched=size)
        return size

    def _late_workers(self, ranks: Sequence[int]) -> tuple[LateWorker, ...]:
        return late_workers([self._workers_now[rank] for rank in ranks])

    def _cancel(self, futures: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
        """Drop what has not started of a call, given by rank; the ranks that are running it."""
        running = cancelled([(self._workers_now[rank], future) for rank, future in futures.items()])
        if force and running:
            for rank in running:
                ray.kill(self.workers[rank])
            self._note_lost(
                [
                    self._workers_now[rank].failure("cancelled", f"its call of {method!r} was cancelled with force")
                    for rank in running
                ]
            )
        return running

    def _note_lost(self, failures: Sequence[WorkerFailure]) -> None:
        with self._lock:
            self._lost.update({failure.rank: failure for failure in failures})
            for worker in self.worker_metadata:  # nothing after a shutdown
                if worker["global_rank"] in self._lost:
                    worker["state"] = "dead"

    def _facts_by_actor(self) -> Mapping[str, WorkerFacts]:
        return self._facts

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End the workers, the last rank first, and give back everything the group held.

        Waits until the workers' processes are gone. Can be repeated; safe when workers are dead or hung, and when
        Ray is down.

        Args:
            cleanup_method: a method that every living worker runs first.
            timeout: seconds for all cleanups together; None: no limit.
            force: no cleanup.

        Returns:
            Whether all went well; what did not is logged.
        """
        if self._shut is not None:
            return self._shut
        self._end_watches()
        clean = True
        try:
            if cleanup_method is not None and not force and self.workers and ray.is_initialized():
                dead = dead_actors() | {actor for actor, who in self._facts.items() if who.rank in self._lost}
                living = {who.rank: self.workers[who.rank] for actor, who in self._facts.items() if actor not in dead}
                clean = clean_up(living, cleanup_method, timeout)
        finally:
            self.workers = []
            self.worker_metadata = []
            ended = self._held.give_back()
            self._shut = clean and ended
        return self._shut

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayWorkerGroup belongs to its driver; send the handles in its `workers` instead")


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
