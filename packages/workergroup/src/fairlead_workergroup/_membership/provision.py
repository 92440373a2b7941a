# SPDX-License-Identifier: Apache-2.0
"""The workers of a group: their plans, ports, starts and ends, for the first start and for each change."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairlead_placement import (
    PortLease,
    PortUnavailableError,
    RayVirtualCluster,
    Slot,
    lease_ports,
)
from fairlead_placement.extension import actor_id_of, group_pairs, head_deadline
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from .._arguments import Arguments, NotPicklableError
from .._model import GroupState, Member, Place, configure_ask
from .._observe.board import ANSWER_S, Publication, actor_name
from .._observe.query import look_at_starts
from .._remote.process import mark_of
from .._start.builder import RayWorkerBuilder
from .._start.environment import EnvVars, check_env_vars, prepare_python, start_variables, variables_at
from .._start.launch import WorkerPlan, create_actors, plan_workers, wait_started
from .._start.layout import resize_places
from .._start.options import WorkerOptions, device_facts, read_master_ports, recursive_merge_options
from .._start.worker_class import Described, WorkerClass, describe_class
from .._world import Deadline
from .core import Core
from .losses import find_losses
from .operations import Plan
from .owned import Owned
from .slots import Slots

# An agent that is late releases the port later, so nobody has to wait longer.
RELEASE_S = 1.0
PORT = "port of an earlier epoch"  # what it is when it is released while the group lives


@dataclass(frozen=True)
class GroupSpec:
    """Everything that the workers of a group are started from, as the user gave it."""

    cluster: RayVirtualCluster | Sequence[Slot]
    builder: RayWorkerBuilder
    python: str | VenvSpec | None
    env_vars: EnvVars
    options: WorkerOptions
    compression: str | None  # of gradients
    memory_limit: int
    token: str  # identifies the group among all groups of all drivers
    concurrent: bool | Literal["auto"]  # whether async methods overlap; "auto" if there are any
    start_timeout_s: float
    hooks: Collection[str] = ()  # the methods of the class that changes of the group call


@dataclass
class Staged:
    """An epoch, with what has been acquired for it."""

    state: GroupState  # its members that have not started have no actor
    worker_class: WorkerClass
    workers: Sequence[WorkerPlan]  # by rank
    lease: PortLease | None  # of the master port; None until the actors of the first start have been requested

    def variables(self) -> tuple[Mapping[str, str], ...]:
        """Return the environment variables that describe each rank."""
        assert self.lease is not None
        return tuple(
            {
                **{name: value for name, value in worker.environment.variables.items() if name in worker.of_rank},
                "MASTER_PORT": str(self.lease.port),
            }
            for worker in self.workers
        )


class Provisioner(Described):
    """Acquires, starts and ends the workers of a group, for its changes; the first start describes their class."""

    def __init__(self, spec: GroupSpec, core: Core, owned: Owned, ports: tuple[int, int] | None) -> None:
        self.spec = spec
        self.owned = owned
        self.slots = Slots(spec.cluster, core, owned)
        self._core = core
        self._ports = ports  # the first and the last port of the cluster; None for any ports
        self._master_ports = read_master_ports(spec.options)
        self._now: Staged | None = None  # the present epoch
        self._arguments: _StoredArguments | None = None
        self._publication: Publication | None = None

    @property
    def has_one_port(self) -> bool:
        """Whether the master port is the same in all epochs."""
        ports = self._master_ports or self._ports
        return ports is not None and ports[0] == ports[1]

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a change with this timeout; None stands for the time of a start."""
        return Deadline.after(self.spec.start_timeout_s if timeout_s is None else timeout_s)

    def prepare(self, before: GroupState, until: Deadline) -> Staged:
        """Claim the slots of the first workers, describe their class, and store the constructor's arguments."""
        places = before.places
        self.slots.claim([place.slot for place in places])
        # Before anything else, because other processes may have it.
        lease = None if self._master_ports is None else self._lease_port(places[0].slot, until)
        described, workers = self._plan(places, until)
        if callable(given := self.spec.env_vars):
            check_env_vars(given(places[0]))  # this logs what workers do not get
        self.worker_class = described
        for name in self.spec.hooks:
            described.method(name).check(0, ())
        self._arguments = _StoredArguments(self.spec.builder, described)
        # Every start uses the stored copies. The originals may be large, or references that keep objects alive.
        builder = RayWorkerBuilder(self.spec.builder.worker).with_methods(*self.spec.builder.methods)
        self.spec = dataclasses.replace(self.spec, builder=builder)
        self._publication = Publication(self._core.name_prefix, self.spec.token, described.to_dict())
        self.owned.own(("publication",), self._publication.withdraw)
        members = tuple(self._next_member(place, 0, 0) for place in places)
        return Staged(dataclasses.replace(before, members=members), described, workers, lease)

    def acquire(self, before: GroupState, plan: Plan, until: Deadline) -> Staged:
        """Get slots, the environment of new workers, and a port if the present one cannot be used."""
        now, places, sharding = self._now, before.places, plan.sharding
        assert now is not None  # the first start has set it
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
        members = []
        for place in places:
            if place.rank not in starting:
                members.append(dataclasses.replace(before.members[place.rank], place=place))
            elif place.rank < len(before.members):
                old = before.members[place.rank]
                counts = old.restarts + (place.rank in plan.counted)
                members.append(self._next_member(place, old.incarnation + 1, counts))
            else:
                gone = before.departed.get(place.rank)
                members.append(self._next_member(place, 0 if gone is None else gone.incarnation + 1, 0))
        lease = now.lease
        # The store of one set of processes cannot be used by another one. A single port is used when they have ended.
        needs_other = (plan.follows or self._core.policy.restarts_all) and not self.has_one_port
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
        with head_deadline(until.left()):
            create_actors(workers, staged.worker_class, names, add)
        members = {rank: made[rank] for rank in ranks}
        self.publish(members)
        if staged.lease is None:  # its agent starts at the same time as the processes of the workers
            staged.lease = self._lease_port(staged.state.members[0].place.slot, until)
        return self._construct(staged, members, until)

    def publish(self, starting: Mapping[int, Member] | None = None, *, wait: bool = False) -> None:
        """Let handles of other processes see the members; with `wait`, wait a moment until those that look now do."""
        if self._publication is not None and not self._core.ending:
            self._publication.publish(self._core.now, starting or {})
            if wait:
                self._publication.await_handles(ANSWER_S)

    def commit(self, staged: Staged) -> None:
        """Use what was staged from now on."""
        self._now, self.worker_class = staged, staged.worker_class

    def settle(self, until: Deadline) -> None:
        """Return what the members of now do not need: workers, slots, and ports of an epoch that has not begun."""
        now = self._core.now
        self.owned.keep_workers({member.actor_id for member in now.members}, until)
        if now.phase != "ended":
            self.slots.keep(now.places)
            used = None if self._now is None else id(self._now.lease)
            self.owned.drop(key for key in self.owned.keys(PORT) if key[1] != used)

    def release_arguments(self) -> None:
        """Release the stored arguments, because nothing is started any more."""
        self._arguments = None

    def layout(self) -> Any:
        """Return the axes over the ranks as plain data, or a reference to them."""
        return self._stored.layout_of(self._core.now.sharding)

    @property
    def _stored(self) -> "_StoredArguments":
        if self._arguments is None:
            raise self._core.ended_error()
        return self._arguments

    def _next_member(self, place: Place, incarnation: int, restarts: int) -> Member:
        """Return a worker that is about to start."""
        name, mark = actor_name(place, self.spec.token, incarnation), mark_of(self.spec.token, place.rank)
        return Member(place, incarnation, restarts, actor_name=name, mark=mark, node_id=place.slot.node_id)

    def _plan(self, places: Sequence[Place], until: Deadline) -> tuple[WorkerClass, Sequence[WorkerPlan]]:
        """Return the class as it is described now, and the plan of each worker of the group at these places."""
        spec, nodes = self.spec, [place.slot.node_id for place in places]
        python = prepare_python(spec.python, nodes, timeout_s=until.left() or 0.0)
        per_node = getattr(spec.cluster, "num_gpus_per_node", None)
        # The class, or its libraries, may need these variables to be found.
        variables = start_variables(variables_at(spec.env_vars, places[0]))
        described = describe_class(
            spec.builder.worker,
            spec.builder.methods,
            asks=[configure_ask(place, per_node) for place in places],
            node_id=nodes[0],
            runtime_env=recursive_merge_options(python.runtime_env, {"env_vars": variables} if variables else {}),
            timeout_s=until.left() or 0.0,
            concurrent=spec.concurrent,
        )
        options = recursive_merge_options(described.options, spec.options.ray_options)
        described = dataclasses.replace(described, options=options)
        return described, plan_workers(places, described, env_vars=spec.env_vars, python=python)

    def _construct(self, staged: Staged, members: Mapping[int, Member], until: Deadline) -> dict[int, Member]:
        """Send the facts and the constructor's arguments to new actors, and wait until they have started."""
        spec, arguments = self.spec, self._stored
        configured = Arguments()
        shared = {
            "communication_backend": getattr(spec.cluster, "communication_backend", None),
            "gradient_compression": spec.compression,
            "layout": arguments.layout_of(staged.state.sharding),
        }
        state = dataclasses.replace(staged.state, variables=staged.variables())
        slots_on = group_pairs((worker.place.slot.node_id, worker.place.slot) for worker in staged.workers)
        refs = []
        for rank, member in members.items():
            worker, mine = staged.workers[rank], state.facts(rank)
            facts = {
                **shared,
                **mine,
                "tree": f"{member.mark}{member.incarnation}",
                "memory_limit": spec.memory_limit,
                "env": {**worker.environment.variables, **mine["env"]},
                "path": list(worker.environment.path),
                "devices": device_facts(worker.place, slots_on[worker.place.slot.node_id], spec.options),
            }
            kwargs = {name: configured.prepare(value) for name, value in worker.init_kwargs.items()}
            # The lists keep Ray from resolving the references: the host fetches them once the environment is set.
            start = member.handle._fairlead_start.remote
            refs.append(start(facts, [arguments.target], arguments.args, {**arguments.kwargs, **kwargs}))
        answers = wait_started(
            refs,
            [*members.values()],
            name=self._core.name_prefix,
            until=until,
            check=self._core.check_goes_on,
            look=look_at_starts,
            explain=lambda member, error: find_losses(self._core, {member: error}).get(member),
        )
        started = {}
        for rank, member in members.items():
            identity = {name: answers[rank][name] for name in ("node_id", "pid", "started", "log")}
            started[rank] = dataclasses.replace(member, **identity)
            self.owned.own_worker(started[rank])
        return started

    def _lease_port(self, slot: Slot, until: Deadline) -> PortLease:
        """Lease a master port on the node of a slot."""
        ports = self._master_ports or self._ports
        bounds: dict[str, Any] = {} if ports is None else {"low": ports[0], "high": ports[1]}
        try:
            ((lease,),) = lease_ports([slot], timeout_s=until.left() or 0.0, **bounds)
        except PortUnavailableError as error:
            if self._master_ports is not None:
                error.add_note(
                    "It is the WorkerOptions(master_port=...) of a group. Give another port or range, or leave it out, "
                    "and the group leases a port of the cluster's port_range."
                )
            raise
        self.owned.own((PORT, id(lease)), lambda: lease.release(timeout_s=RELEASE_S))
        return lease


class _StoredArguments:
    """The constructor's arguments and the facts about all workers, stored once for as long as the group lives."""

    def __init__(self, builder: RayWorkerBuilder, described: WorkerClass) -> None:
        self._stored = Arguments()
        self.target = self._stored.prepare(described.target)  # the full name of the class, or its pickled bytes
        self.args = [self._prepare(described, number, value) for number, value in enumerate(builder.args)]
        self.kwargs = {name: self._prepare(described, name, value) for name, value in builder.kwargs.items()}
        self._layout: tuple[NamedSharding, Any] | None = None

    def layout_of(self, sharding: NamedSharding) -> Any:
        """Return axes over ranks as plain data, or a reference to them; the latest ones are kept."""
        if self._layout is None or self._layout[0] is not sharding:
            layout: Any = sharding.to_dict()
            if "ranks" in layout:  # it grows with the group, so it is stored and not sent to each worker
                layout = Arguments().prepare(layout)
            self._layout = sharding, layout
        return self._layout[1]

    def _prepare(self, described: WorkerClass, name: object, value: Any) -> Any:
        try:
            return self._stored.prepare(value)
        except NotPicklableError as error:
            raise TypeError(f"argument {name!r} of the constructor of {described.name!r}: {error}") from None
