# SPDX-License-Identifier: Apache-2.0
"""The start of the workers of a group, the first time and after each loss."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairlead_placement import PortLease, RayVirtualCluster, Slot
from fairlead_placement.extension import group_pairs, head_deadline
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from .._membership.facts import WorkerFacts
from .._membership.model import Place, Started, configure_ask
from .._observe.query import WorkerLook, look_at_starts
from .._observe.registration import Registration, actor_name
from .._ray_private import actor_id_of
from .._remote.process import mark_of
from .._start.devices import WorkerOptions, device_facts
from .._start.environment import EnvVars, WorkerPython, check_env_vars, prepare_python, start_variables, variables_at
from .._start.launch import WorkerPlan, create_actors, plan_workers, wait_started
from .._start.options import recursive_merge_options
from .._start.worker_class import Described, WorkerClass, describe_class
from .._transport.arguments import Arguments, NotPicklableError
from .._world import NEVER, Deadline
from .resources import Resources
from .shutdown import RunningWorker


@dataclass(frozen=True)
class GroupSpec:
    """Everything that the workers of a group are started from, as the user gave it."""

    cluster: RayVirtualCluster | Sequence[Slot]
    worker: Any
    methods: Sequence[str]  # with a leading underscore, beside the public ones
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    python: str | VenvSpec | None
    env_vars: EnvVars
    options: WorkerOptions
    facts: Mapping[str, Any]  # that `current_worker` returns in every worker
    memory_limit: int  # bytes of a worker and its descendants; 0 for no limit
    token: str  # identifies the group among all groups of all drivers
    concurrent: bool | Literal["auto"]  # whether async methods overlap; "auto" if there are any
    start_timeout_s: float

    def slots(self) -> Sequence[Slot]:
        """Return the slots of the cluster as they are now, or those that the group was made from."""
        return self.cluster.slots() if isinstance(self.cluster, RayVirtualCluster) else tuple(self.cluster)


class Launcher(Described):
    """Start the workers of a group in their slots, and add them to its resources; `prepare` describes their class."""

    spec: GroupSpec
    master: tuple[str, int]  # address and port of the store of their process group; set by the first start

    def __init__(self, spec: GroupSpec, resources: Resources) -> None:
        self.spec = spec
        self.resources = resources
        self._roster = resources.roster
        self._plan: LaunchPlan | None = None
        self._arguments: _StoredArguments | None = None

    def prepare(self, places: Sequence[Place], *, deadline: Deadline = NEVER) -> None:
        """Describe the class where the workers will run, and plan each worker; nothing changes if that fails."""
        self.adopt(self.plan(places, self._roster.now.sharding, deadline=deadline))
        if callable(given := self.spec.env_vars):
            check_env_vars(given(places[0]))  # this logs what workers do not get

    def plan(self, places: Sequence[Place], sharding: NamedSharding, *, deadline: Deadline = NEVER) -> "LaunchPlan":
        """Return the plan of each worker of the group, at these places on these axes. Nothing changes."""
        spec = self.spec
        nodes = [place.slot.node_id for place in places]
        python = prepare_python(spec.python, nodes, timeout_s=self._time_left(deadline))
        per_node = getattr(spec.cluster, "num_gpus_per_node", None)
        # The class, or its libraries, may need these variables to be found.
        variables = start_variables(variables_at(spec.env_vars, places[0]))
        described = describe_class(
            spec.worker,
            spec.methods,
            asks=[configure_ask(place, per_node) for place in places],
            node_id=nodes[0],
            runtime_env=recursive_merge_options(python.runtime_env, {"env_vars": variables} if variables else {}),
            timeout_s=self._time_left(deadline),
            concurrent=spec.concurrent,
        )
        options = recursive_merge_options(described.options, spec.options.ray_options)
        described = dataclasses.replace(described, options=options)
        plans = plan_workers(places, described, sharding=sharding, env_vars=spec.env_vars, python=python)
        return LaunchPlan(described, plans, sharding, python)

    def adopt(self, plan: "LaunchPlan") -> None:
        """Use a plan for all starts from now on."""
        self._plan = plan
        self.worker_class = plan.worker_class

    def store(self) -> None:
        """Store the constructor's arguments, and the facts that are the same for all workers."""
        spec = self.spec
        self._arguments = _StoredArguments(spec, self.worker_class)
        # Every start uses the stored copies. The originals may be large, or references that keep objects alive.
        self.spec = dataclasses.replace(spec, args=(), kwargs={})
        self.resources.registration = Registration(
            self._roster,
            spec.token,
            self.worker_class.name,
            methods=self.worker_class.to_dict(),
        )

    def release(self) -> None:
        """Release the stored arguments, because nothing is started any more."""
        self._arguments = None

    def start(
        self,
        plan: "LaunchPlan",
        ranks: Sequence[int],
        *,
        lease: Callable[[], PortLease],
        epoch: int,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> list[Started]:
        """Start the workers of these ranks, and wait until every constructor has finished."""
        # Actors first: the agent that holds the port starts at the same time as the processes of the workers.
        with head_deadline(self.spec.start_timeout_s):
            actors = self._create_actors(plan, ranks)
        port = lease().port
        return self._construct(plan, actors, port, epoch=epoch, deadline=deadline, check=check)

    def begin(self, plan: "LaunchPlan", lease: PortLease) -> None:
        """Use the plan and the master port of an epoch that has begun."""
        self.adopt(plan)
        self.master = lease.address, lease.port

    def facts(self, plan: "LaunchPlan", port: int, *, epoch: int) -> tuple[WorkerFacts, ...]:
        """Return the facts of each rank in an epoch."""
        return tuple(
            WorkerFacts(
                worker.place.rank,
                epoch,
                self._roster.next_incarnation(worker.place.rank),
                plan.sharding.size,
                worker.place.name,
                worker.process.coords,
                {
                    **{name: value for name, value in worker.environment.variables.items() if name in worker.of_rank},
                    "MASTER_PORT": str(port),
                },
            )
            for worker in plan.workers
        )

    @property
    def target(self) -> Any:
        """The full name of the class, or its pickled bytes, or a reference to them."""
        return self._stored.target

    def layout(self) -> Any:
        """Return the axes over the ranks as plain data, or a reference to them."""
        return self._stored.layout_of(self.planned.sharding)

    @property
    def planned(self) -> "LaunchPlan":
        """The plan that starts use now."""
        if self._plan is None:
            raise self._roster.ended_error()
        return self._plan

    @property
    def _stored(self) -> "_StoredArguments":
        if self._arguments is None:
            raise self._roster.ended_error()
        return self._arguments

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a change with this timeout; None stands for the time of a start."""
        return Deadline.after(self.spec.start_timeout_s if timeout_s is None else timeout_s)

    def _time_left(self, deadline: Deadline) -> float:
        """Return how long a part of a start may take, in seconds."""
        return deadline.left(at_most=self.spec.start_timeout_s) or 0.0

    def _create_actors(self, plan: "LaunchPlan", ranks: Sequence[int]) -> dict[int, RunningWorker]:
        """Create the actors of ranks; return their workers, in order."""
        token, registration = self.spec.token, self.resources.registration
        if registration is None:
            raise self._roster.ended_error()
        starting: dict[int, RunningWorker] = {}

        def add(worker: WorkerPlan, actor: Any) -> None:
            rank = worker.place.rank
            starting[rank] = RunningWorker(actor, worker.place.slot.node_id, mark_of(token, rank))
            self.resources.add({rank: starting[rank]})

        workers = [plan.workers[rank] for rank in ranks]
        names = [actor_name(one.place, token, self._roster.next_incarnation(one.place.rank)) for one in workers]
        create_actors(workers, plan.worker_class, names, name=self._roster.name_prefix, add=add)
        registration.publish({rank: one.handle for rank, one in starting.items()})
        return {rank: starting[rank] for rank in ranks}

    def _construct(
        self,
        plan: "LaunchPlan",
        actors: Mapping[int, RunningWorker],
        port: int,
        *,
        epoch: int,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> list[Started]:
        """Send the facts and the constructor's arguments to new actors, and wait until they have started."""
        spec, arguments = self.spec, self._stored
        configured = Arguments()
        shared = {**spec.facts, "layout": arguments.layout_of(plan.sharding)}
        known = self.facts(plan, port, epoch=epoch)
        slots_on = group_pairs((worker.place.slot.node_id, worker.place.slot) for worker in plan.workers)
        refs = []
        for rank, one in actors.items():
            worker, mine = plan.workers[rank], known[rank]
            facts = {
                **shared,
                **mine.to_dict(),
                "tree": f"{one.mark}{mine.incarnation}",
                "memory_limit": spec.memory_limit,
                "env": {**worker.environment.variables, **mine.env},
                "path": list(worker.environment.path),
                "devices": device_facts(worker.place, slots_on[worker.place.slot.node_id], spec.options),
            }
            kwargs = {name: configured.prepare(value) for name, value in worker.init_kwargs.items()}
            # The lists keep Ray from resolving the references: the host fetches them once the environment is set.
            refs.append(
                one.handle._fairlead_start.remote(
                    facts, [arguments.target], arguments.args, {**arguments.kwargs, **kwargs}
                )
            )
        plans = [plan.workers[rank] for rank in actors]
        timeout_s, name = self._time_left(deadline), self._roster.name_prefix
        handles = [one.handle for one in actors.values()]

        def look(late: Sequence[WorkerPlan]) -> list[WorkerLook | None]:
            return look_at_starts([actors[worker.place.rank] for worker in late])

        answers = wait_started(
            refs,
            plans,
            actors=handles,
            name=name,
            timeout_s=timeout_s,
            check=check,
            look=look,
            memory_limit=bool(spec.memory_limit),
        )
        started = []
        for worker, one, answer in zip(plans, actors.values(), answers, strict=True):
            process = {"pid": answer["pid"], "started": answer["started"]}
            self.resources.add({worker.place.rank: dataclasses.replace(one, node_id=answer["node_id"], **process)})
            identity = {**process, "actor_id": actor_id_of(one.handle), "log": answer["log"]}
            started.append(Started(one.handle, worker.place, dataclasses.replace(worker.process, **identity)))
        return started


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that the workers of a group on one set of axes are started from; `workers` is by rank."""

    worker_class: WorkerClass
    workers: Sequence[WorkerPlan]
    sharding: NamedSharding
    python: WorkerPython


class _StoredArguments:
    """The constructor's arguments and the facts about all workers, stored once for as long as the group lives."""

    def __init__(self, spec: GroupSpec, worker_class: WorkerClass) -> None:
        self.stored = Arguments()
        self._class_name = worker_class.name
        self.target = self.stored.prepare(worker_class.target)
        self.args = [self._prepare(at, value) for at, value in enumerate(spec.args)]
        self.kwargs = {name: self._prepare(name, value) for name, value in spec.kwargs.items()}
        self._layout: tuple[NamedSharding, Any] | None = None

    def layout_of(self, sharding: NamedSharding) -> Any:
        """Return axes over ranks as plain data, or a reference to them; the latest ones are kept."""
        if self._layout is None or self._layout[0] is not sharding:
            layout: Any = sharding.to_dict()
            if "ranks" in layout:  # it grows with the group, so it is stored and not sent to each worker
                layout = Arguments().prepare(layout)
            self._layout = sharding, layout
        return self._layout[1]

    def _prepare(self, name: object, value: Any) -> Any:
        try:
            return self.stored.prepare(value)
        except NotPicklableError as error:
            raise TypeError(f"argument {name!r} of the constructor of {self._class_name!r}: {error}") from None
