# SPDX-License-Identifier: Apache-2.0
"""The workers of a group: their plans, ports, starts and ends, for the first start and for each change."""

import dataclasses
import itertools
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import PortLease, RayVirtualCluster, Slot, lease_ports
from fairlead_placement.extension import actor_id_of, ask_head, await_published, group_pairs, head_deadline
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from .._arguments import Arguments, NotPicklableError
from .._model import GroupState, Member, Place, configure_ask
from .._observe.board import ANSWER_S, Publication, actor_name
from .._observe.progress_bar import Bar
from .._observe.query import look_at_starts
from .._start.environment import (
    RANK_VARIABLES,
    WorkerOptions,
    actor_options,
    device_facts,
    forwarded_variables,
    prepare_python,
    read_master_ports,
    recursive_merge_options,
    start_variables,
    worker_environment,
)
from .._start.worker_class import RayWorkerBuilder, WorkerClass, describe_class
from .._world import Deadline
from ..exceptions import WorkerFailure
from .core import Core
from .losses import SHOWN, find_losses, late_error, start_error
from .operations import Plan
from .owned import Owned
from .places import Slots, resize_places

# An agent that is late releases the port later, so nobody has to wait longer.
RELEASE_S = 1.0
PORT = "port of an earlier epoch"  # what it is when it is released while the group lives
# How many actors are requested at a time. Ray's head acknowledges each request for a named actor before the next one of
# the same thread is sent, so that a large group neither waits for every round trip nor floods the head.
WINDOW = 16
# How often the progress bar moves.
SHOWN_EVERY_S = 0.1
# How many ranks it is given; it names 8.
NAMED = 9


@dataclass(frozen=True)
class GroupSpec:
    """Everything that the workers of a group are started from, as the user gave it."""

    cluster: RayVirtualCluster | Sequence[Slot]
    builder: RayWorkerBuilder
    python: str | VenvSpec | None
    env_vars: Mapping[str, str]
    options: WorkerOptions
    compression: str | None  # of gradients
    memory_limit: int
    token: str  # identifies the group among all groups of all drivers
    concurrent: bool | Literal["auto"]  # whether async methods overlap; "auto" if there are any
    start_timeout_s: float
    on_resize: str | None = None  # a method of the class that all workers run in the new epoch of a resize


@dataclass(frozen=True)
class WorkerPlan:
    """Everything that one worker is started from."""

    place: Place
    options: Mapping[str, Any]
    variables: Mapping[str, str]
    init_kwargs: Mapping[str, Any]


@dataclass
class Staged:
    """An epoch, with what has been acquired for it."""

    state: GroupState  # its members that have not started have no actor
    worker_class: WorkerClass
    workers: Sequence[WorkerPlan]  # by rank
    lease: PortLease | None  # of the master port; None until the actors of the first start have been requested

    def variables(self) -> tuple[Mapping[str, str], ...]:
        assert self.lease is not None
        return tuple(
            {
                **{name: value for name, value in worker.variables.items() if name in RANK_VARIABLES},
                "MASTER_PORT": str(self.lease.port),
            }
            for worker in self.workers
        )


class Provisioner:
    """Acquires, starts and ends the workers of a group, for its changes; the first start describes their class."""

    def __init__(self, spec: GroupSpec, core: Core, owned: Owned, ports: tuple[int, int] | None) -> None:
        self.spec = spec
        self.owned = owned
        self.slots = Slots(spec.cluster, core, owned)
        self._core = core
        self._ports = read_master_ports(spec.options) or ports  # the first and the last one; None for any ports
        self._now: Staged | None = None  # the present epoch
        self._arguments: tuple[Any, list[Any], dict[str, Any]] | None = None  # see `_store_arguments`
        self._publication: Publication | None = None

    @property
    def has_one_port(self) -> bool:
        """Whether the master port is the same in all epochs."""
        return self._ports is not None and self._ports[0] == self._ports[1]

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a change with this timeout; None stands for the time of a start."""
        return Deadline.after(self.spec.start_timeout_s if timeout_s is None else timeout_s)

    def _prepare(self, before: GroupState, until: Deadline) -> Staged:
        """Claim the slots of the first workers, describe their class, and store the constructor's arguments."""
        places = before.places
        self.slots.claim([place.slot for place in places])
        # Before anything else, because other processes may have it.
        lease = None if self.spec.options.master_port is None else self._lease_port(places[0].slot, until)
        described, workers = self._plan(places, until)
        self._core.worker_class = described
        for name in filter(None, (self._core.policy.method, self.spec.on_resize)):
            described.method(name).check(0, ())
        self._arguments = _store_arguments(self.spec.builder, described)
        # Every start uses the stored copies. The originals may be large, or references that keep objects alive.
        builder = RayWorkerBuilder(self.spec.builder.worker).with_methods(*self.spec.builder.methods)
        self.spec = dataclasses.replace(self.spec, builder=builder)
        self.owned.own(("arguments",), partial(setattr, self, "_arguments", None))
        self._publication = Publication(self._core.name_prefix, self.spec.token, described.plain)
        self.owned.own(("publication",), self._publication.withdraw)
        members = tuple(self._next_member(place, 0, 0) for place in places)
        return Staged(dataclasses.replace(before, members=members), described, workers, lease)

    def acquire(self, before: GroupState, plan: Plan, until: Deadline) -> Staged:
        """Get slots, the environment of new workers, and a port if the present one cannot be used."""
        now, places, sharding = self._now, before.places, plan.sharding
        if now is None:
            return self._prepare(before, until)
        starting, size = {*plan.new, *plan.replaced}, sharding.size
        if plan.moved:
            places = self.slots.move(places, plan.moved)
        stays = [rank for rank in sorted(starting) if rank < len(places) and rank not in plan.moved]
        places = self.slots.avoid_unusable(places, stays, until)
        if size != len(places):
            added = self.slots.claim_new(places, size - len(places), plan.slots)
            places = resize_places(places, size, added, prefix=self._core.name_prefix)
        places = tuple(dataclasses.replace(place, coords=sharding.get_worker_coords(place.rank)) for place in places)
        described, workers = now.worker_class, now.workers
        if places != before.places:
            described, workers = self._plan(places, until)
        self.slots.claim(place.slot for place in places)
        members, latest = [], self._core.latest_incarnations()
        for place in places:
            if place.rank not in starting:
                members.append(dataclasses.replace(before.members[place.rank], place=place))
            elif place.rank < len(before.members):
                old = before.members[place.rank]
                members.append(self._next_member(place, old.incarnation + 1, old.restarts + plan.counts))
            else:
                members.append(self._next_member(place, latest.get(place.rank, -1) + 1, 0))
        lease = now.lease
        # The store of one set of processes cannot be used by another one. A single port is used when they have ended.
        needs_other = (plan.follows or self._core.restarts_all) and not self.has_one_port
        if lease is None or needs_other or lease.node_id != places[0].slot.node_id:
            lease = self._lease_port(places[0].slot, until)
        epoch = before.group_epoch + 1
        state = dataclasses.replace(before, sharding=sharding, members=tuple(members), group_epoch=epoch)
        return Staged(state, described, workers, lease)

    def start(self, staged: Staged, ranks: Sequence[int], until: Deadline) -> dict[int, Member]:
        """Start the workers of these ranks, and wait until every constructor has finished; return them by rank."""
        made: dict[int, Member] = {}

        def add(worker: WorkerPlan, actor: Any) -> None:
            rank = worker.place.rank
            member = dataclasses.replace(staged.state.members[rank], handle=actor, actor_id=actor_id_of(actor))
            self.owned.own_worker(member)
            made[rank] = member

        workers = [staged.workers[rank] for rank in ranks]
        names = [staged.state.members[rank].actor_name for rank in ranks]
        if staged.lease is None:
            self.publish()  # so that the process of the agent, for whose port the workers wait, starts before theirs
        with head_deadline(until.left()):
            create_actors(workers, staged.worker_class, names, add)
        members = {rank: made[rank] for rank in ranks}
        self.publish(members)
        if staged.lease is None:
            staged.lease = self._lease_port(staged.state.members[0].place.slot, until)
        return self._construct(staged, members, until)

    def publish(self, starting: Mapping[int, Member] | None = None) -> None:
        """Let handles of other processes see the members."""
        if self._publication is not None and not self._core.ending:
            self._publication.publish(self._core.now, starting or {})

    def await_handles(self) -> None:
        """Wait a moment until handles that look now see the group."""
        if self._publication is not None:
            await_published(self._publication.key, timeout_s=ANSWER_S)

    def commit(self, staged: Staged) -> None:
        self._now, self._core.worker_class = staged, staged.worker_class

    def settle(self, until: Deadline) -> None:
        """Return what the members of now do not need: workers, slots, and ports of an epoch that has not begun."""
        now = self._core.now
        self.owned.keep_workers({member.actor_id for member in now.members}, until)
        self.slots.keep(now.places)
        used = None if self._now is None else id(self._now.lease)
        self.owned.drop(key for key in self.owned.keys(PORT) if key[1] != used)

    def _next_member(self, place: Place, incarnation: int, restarts: int) -> Member:
        name, mark = actor_name(place, self.spec.token, incarnation), f"{self.spec.token}-{place.rank}-{incarnation}"
        return Member(place, incarnation, restarts, actor_name=name, mark=mark, node_id=place.slot.node_id)

    def _plan(self, places: Sequence[Place], until: Deadline) -> tuple[WorkerClass, Sequence[WorkerPlan]]:
        """Return the class as it is described now, and the plan of each worker of the group at these places."""
        spec, nodes = self.spec, [place.slot.node_id for place in places]
        python = prepare_python(spec.python, nodes, timeout_s=until.left() or 0.0)
        per_node = getattr(spec.cluster, "num_gpus_per_node", None)
        # The class, or its libraries, may need these variables to be found.
        variables = start_variables(spec.env_vars)
        described = describe_class(
            spec.builder.worker,
            spec.builder.methods,
            asks=[configure_ask(place, per_node) for place in places],
            node_id=nodes[0],
            runtime_env=recursive_merge_options(python, {"env_vars": variables} if variables else {}),
            timeout_s=until.left() or 0.0,
            concurrent=spec.concurrent,
        )
        return described, plan_workers(places, described, env_vars=spec.env_vars, python=python)

    def _construct(self, staged: Staged, members: Mapping[int, Member], until: Deadline) -> dict[int, Member]:
        """Send the facts and the constructor's arguments to new actors, and wait until they have started."""
        spec = self.spec
        if self._arguments is None:
            raise self._core.ended_error()
        target, args, init_kwargs = self._arguments
        configured = Arguments()
        shared = {
            "communication_backend": getattr(spec.cluster, "communication_backend", None),
            "gradient_compression": spec.compression,
            "layout": store_layout(staged.state.sharding),
        }
        state = dataclasses.replace(staged.state, variables=staged.variables())
        slots_on = group_pairs((worker.place.slot.node_id, worker.place.slot) for worker in staged.workers)
        refs = []
        for rank, member in members.items():
            worker, mine = staged.workers[rank], state.facts(rank)
            facts = {
                **shared,
                **mine,
                "tree": member.mark,
                "memory_limit": spec.memory_limit,
                "env": {**worker.variables, **mine["env"]},
                "devices": device_facts(worker.place, slots_on[worker.place.slot.node_id], spec.options),
            }
            kwargs = {name: configured.prepare(value) for name, value in worker.init_kwargs.items()}
            # The lists keep Ray from resolving the references: the host fetches them once the environment is set.
            start = member.handle._fairlead_start.remote
            refs.append(start(facts, [target], args, {**init_kwargs, **kwargs}))
        answers = wait_started(
            refs,
            [*members.values()],
            name=self._core.name_prefix,
            until=until,
            check=self._core.check_goes_on,
            explain=lambda member, error: find_losses(self._core, {member: error}).get(member),
        )
        started = {}
        for rank, member in members.items():
            identity = {name: answers[rank][name] for name in ("node_id", "pid", "started", "log")}
            started[rank] = dataclasses.replace(member, **identity)
            self.owned.own_worker(started[rank])
        return started

    def _lease_port(self, slot: Slot, until: Deadline) -> PortLease:
        bounds: dict[str, Any] = {} if self._ports is None else {"low": self._ports[0], "high": self._ports[1]}
        ((lease,),) = lease_ports([slot], timeout_s=until.left() or 0.0, **bounds)
        self.owned.own((PORT, id(lease)), lambda: lease.release(timeout_s=RELEASE_S))
        return lease


def store_layout(sharding: NamedSharding) -> Any:
    """Return axes over ranks as plain data; or a reference to them if they grow with the group."""
    layout = sharding.to_dict()
    return Arguments().prepare(layout) if "ranks" in layout else layout


def _store_arguments(builder: RayWorkerBuilder, described: WorkerClass) -> tuple[Any, list[Any], dict[str, Any]]:
    """Store what a worker loads its class from, and the constructor's arguments, once for the life of the group."""
    stored = Arguments()

    def prepare(name: object, value: Any) -> Any:
        try:
            return stored.prepare(value)
        except NotPicklableError as error:
            raise TypeError(f"argument {name!r} of the constructor of {described.name!r}: {error}") from None

    args = [prepare(number, value) for number, value in enumerate(builder.args)]
    kwargs = {name: prepare(name, value) for name, value in builder.kwargs.items()}
    return stored.prepare(described.target), args, kwargs


# The steps of a start.


def plan_workers(
    places: Sequence[Place],
    described: WorkerClass,
    *,
    env_vars: Mapping[str, str],
    python: Mapping[str, Any],
) -> list[WorkerPlan]:
    """Return the options and the environment of every worker. Pure, except that it reads the driver's environment."""
    forwarded = forwarded_variables(os.environ)
    class_env = dict(described.options.get("runtime_env") or {})
    of_class = class_env.pop("env_vars", {})
    shared = {**class_env, **python}
    plans = []
    for place in places:
        resources, configured_env, init_kwargs, overrides = described.configuration(place.rank)
        variables, loader_variables = worker_environment(
            driver=forwarded,
            of_class=of_class,
            of_slot=place.slot.env,
            of_user=env_vars,
            of_rank={  # without MASTER_PORT, which is leased while the actors start
                "RANK": str(place.rank),
                "WORLD_SIZE": str(len(places)),
                "NODE_RANK": str(place.node_rank),
                "LOCAL_RANK": str(place.local_rank),
                "LOCAL_WORLD_SIZE": str(place.local_world_size),
                "MASTER_ADDR": places[0].slot.node_ip,
            },
            configured={**overrides.get("env_vars", {}), **configured_env},
        )
        runtime_env = recursive_merge_options(shared, {n: v for n, v in overrides.items() if n != "env_vars"})
        if loader_variables:
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **loader_variables}
        options = actor_options(
            place.slot,
            of_class=described.options,
            resources=resources,
            runtime_env=runtime_env,
            concurrent=described.concurrent,
        )
        plans.append(WorkerPlan(place, options, variables, init_kwargs))
    return plans


def create_actors(
    plans: Sequence[WorkerPlan], described: WorkerClass, names: Sequence[str], add: Callable[[WorkerPlan, Any], None]
) -> None:
    """Create the named actors of workers, `WINDOW` at a time; call `add` with each handle, on any thread."""

    def create(request: tuple[WorkerPlan, str]) -> None:
        plan, name = request
        actor_class = described.actor_class.options(
            **plan.options,
            name=name,
            # The group restarts workers itself: Ray's restarts hang in RESTARTING once a placement group is gone.
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                plan.place.slot.placement_group, plan.place.slot.bundle_index, placement_group_capture_child_tasks=True
            ),
        )
        add(plan, ask_head("create a worker", actor_class.remote, undo=ray.kill))

    first, *others = zip(plans, names, strict=True)
    create(first)  # this exports the class, which has to happen once
    with ThreadPoolExecutor(WINDOW) as pool:
        requested = [pool.submit(copy_context().run, create, request) for request in others]
        try:
            for future in requested:
                future.result()
        finally:
            for future in requested:
                future.cancel()


def wait_started(
    started: Sequence[ObjectRef],
    members: Sequence[Member],
    *,
    name: str,
    until: Deadline,
    check: Callable[[], None],
    explain: Callable[[Member, BaseException], WorkerFailure | None] = lambda member, error: None,
) -> dict[int, dict[str, Any]]:
    """Wait until all constructors have finished; return what each worker reports, by rank.

    `explain` returns the loss of a worker, if that is what an error means.
    """
    answers: dict[int, dict[str, Any]] = {}
    began = time.monotonic()  # which fairlead-inspect reads from outside, with `name`
    pending = {member.rank: member for member in members}
    # Each answer comes once, in the order of arrival: the first failure is the cause of others that soon follow. A
    # `ray.wait` would be given all pending references again for each answer.
    arrived: queue.SimpleQueue[tuple[int, Future[dict[str, Any]]]] = queue.SimpleQueue()
    for rank, ref in zip(pending, started, strict=True):
        ref.future().add_done_callback(lambda answer, rank=rank: arrived.put((rank, answer)))
    with Bar(f"Starting {name}: process, import, constructor", len(started)) as bar:
        shown_at = began
        while pending:
            try:
                rank, answer = arrived.get(timeout=until.left(at_most=SHOWN_EVERY_S))
            except queue.Empty:
                check()
                if until.passed:
                    slow = list(pending.values())
                    raise late_error(slow, look_at_starts(slow[:SHOWN]), len(started), until.limit_s or 0.0) from None
            else:
                member = pending.pop(rank)
                if (error := answer.exception()) is not None:
                    # The text has the traceback in the worker.
                    raise start_error(error, member, len(answers), list(pending), explain(member, error)) from None
                answers[rank] = answer.result()
            if (now := time.monotonic()) - shown_at >= SHOWN_EVERY_S:
                shown_at = now
                bar.show(len(answers), waiting_for=list(itertools.islice(pending, NAMED)))
    return answers
