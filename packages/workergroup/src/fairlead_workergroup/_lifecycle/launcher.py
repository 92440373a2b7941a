# SPDX-License-Identifier: Apache-2.0
"""The start of the workers of a group, the first time and after each loss."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from .._arguments import Arguments, NotPicklableError
from .._members import Place
from .._observe.memory import MemoryLimit
from .._observe.registration import Registration
from .._observe.statistics import Counters
from .._ray_private import actor_id_of
from .._remote.process import mark_of
from .._start.environment import prepare_python, start_variables
from .._start.launch import WorkerPlan, create_actor, plan_workers, wait_started
from .._start.options import recursive_merge_options
from .._start.worker_class import WorkerClass, describe_class
from .resources import Resources
from .shutdown import RunningWorker


@dataclass(frozen=True)
class GroupSpec:
    """Everything that the workers of a group are started from, as the user gave it.

    Attributes:
        cluster: the cluster or the slots of the group.
        worker: the class, or its full name.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.
        python: the Python of the workers; None for the driver's own.
        env_vars: the user's variables.
        sharding: the axes over the ranks.
        facts: the facts that `current_worker` returns in every worker.
        memory_limit: the limit that the node agents enforce; None without one.
        token: identifies the group among all groups of all drivers.
        concurrent: whether async methods overlap.
        start_timeout_s: how long all constructors together may take.
    """

    cluster: RayVirtualCluster | Sequence[Slot]
    worker: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    python: str | VenvSpec | None
    env_vars: Mapping[str, str]
    sharding: NamedSharding
    facts: Mapping[str, Any]
    memory_limit: MemoryLimit | None
    token: str
    concurrent: bool
    start_timeout_s: float


class Launcher:
    """Start the workers of a group in their slots.

    Args:
        spec: the description of the group's workers.
        resources: the resources of the group, to which the launcher adds the workers that it starts.
        counters: the counters of the group.

    Attributes:
        spec, resources: as given.
        worker_class: the class, as described where the workers run; set by `prepare`.
        master: address and port of the store of the workers' process group; set by the first start.
    """

    spec: GroupSpec
    worker_class: WorkerClass
    master: tuple[str, int]

    def __init__(self, spec: GroupSpec, resources: Resources, counters: Counters) -> None:
        self.spec = spec
        self.resources = resources
        self._roster = resources.roster
        self._counters = counters
        self._plans: list[WorkerPlan] = []
        self._arguments: _StoredArguments | None = None

    def prepare(self, places: Sequence[Place]) -> None:
        """Describe the class where the workers will run, and plan each worker; nothing changes if that fails."""
        spec = self.spec
        nodes = [place.slot.node_id for place in places]
        python = prepare_python(spec.python, nodes, timeout_s=spec.start_timeout_s)
        per_node = getattr(spec.cluster, "num_gpus_per_node", None)
        # The class, or its libraries, may need these variables to be found.
        variables = start_variables(spec.env_vars)
        described = describe_class(
            spec.worker,
            asks=[place.configure_ask(per_node) for place in places],
            node_id=nodes[0],
            runtime_env=recursive_merge_options(python.runtime_env, {"env_vars": variables} if variables else {}),
            timeout_s=spec.start_timeout_s,
            concurrent=spec.concurrent,
        )
        coords = [member.coords for member in self._roster.snapshot().members]
        self._plans = plan_workers(places, described, coords=coords, env_vars=spec.env_vars, python=python)
        self.worker_class = described

    def store(self) -> None:
        """Store the constructor's arguments, and the facts that are the same for all workers.

        Raises:
            TypeError: an argument of the constructor cannot be pickled.
        """
        spec = self.spec
        self._arguments = arguments = _StoredArguments(spec, self.worker_class)
        # Every start uses the stored copies. The originals may be large, or references that keep objects alive.
        self.spec = dataclasses.replace(spec, args=(), kwargs={})
        self.resources.registration = Registration(self._roster, spec.token, self.worker_class.name, spec.sharding)
        self._counters.add(puts=arguments.stored.puts, bytes_put=arguments.stored.bytes_put)

    def release(self) -> None:
        """Release the stored arguments, because nothing is started any more."""
        self._arguments = None

    def start(self, ranks: Sequence[int]) -> None:
        """Start the workers of these ranks, and wait until every constructor has finished.

        Raises:
            WorkerStartError: a constructor failed or took too long.
            WorkerGroupError: the group is being shut down.
        """
        spec, arguments, registration = self.spec, self._arguments, self.resources.registration
        if arguments is None or registration is None:
            raise self._roster.ended_error()
        plans = [self._plans[rank] for rank in ranks]
        marks = [mark_of(spec.token, rank) for rank in ranks]
        incarnations = [self._roster.snapshot()[rank].incarnation for rank in ranks]
        actors = [
            create_actor(plan, self.worker_class, f"{spec.token[:6]}-{plan.place.rank}-{incarnation}")
            for plan, incarnation in zip(plans, incarnations, strict=True)
        ]
        for plan, actor, mark in zip(plans, actors, marks, strict=True):
            self.resources.add({plan.place.rank: RunningWorker(actor, plan.place.slot.node_id, mark)})
        registration.publish(dict(zip(ranks, actors, strict=True)))
        # Lease the port now: the agent that holds it starts at the same time as the processes of the workers.
        ports = spec.cluster.port_range if isinstance(spec.cluster, RayVirtualCluster) else None
        lease = self.resources.lease_port(self._plans[0].place, ports)
        self.master = lease.address, lease.port

        configured = Arguments()
        starting = []
        for plan, actor, mark, incarnation in zip(plans, actors, marks, incarnations, strict=True):
            facts = {
                **arguments.facts,
                "rank": plan.place.rank,
                "name": plan.place.name,
                "coords": dict(plan.coords),
                "incarnation": incarnation,
                "tree": f"{mark}{incarnation}",
                "env": {**plan.environment.variables, "MASTER_PORT": str(lease.port)},
                "path": list(plan.environment.path),
            }
            kwargs = {name: configured.prepare(value) for name, value in plan.init_kwargs.items()}
            # The lists keep Ray from resolving the references: the host fetches them once the environment is set.
            starting.append(
                actor._fairlead_start.remote(facts, [arguments.target], arguments.args, {**arguments.kwargs, **kwargs})
            )
        self._counters.add(requests=len(starting), puts=configured.puts, bytes_put=configured.bytes_put)
        answers = wait_started(starting, plans, name=self._roster.name_prefix, timeout_s=spec.start_timeout_s)
        started = []
        for plan, actor, mark, answer in zip(plans, actors, marks, answers, strict=True):
            process = {"pid": answer["pid"], "started": answer["started"]}
            worker = dataclasses.replace(plan.facts, **process)
            self.resources.add({worker.rank: RunningWorker(actor, answer["node_id"], mark, **process)})
            started.append((actor_id_of(actor), actor, plan.place, worker))
        self._roster.record_start(started)
        registration.publish()
        if spec.memory_limit is not None:
            spec.memory_limit.guard([worker for *_, worker in started])


class _StoredArguments:
    """The constructor's arguments and the facts about all workers, stored once for as long as the group lives."""

    def __init__(self, spec: GroupSpec, worker_class: WorkerClass) -> None:
        self.stored = Arguments()
        self._class_name = worker_class.name
        self.target = self.stored.prepare(worker_class.target)
        self.args = [self._prepare(at, value) for at, value in enumerate(spec.args)]
        self.kwargs = {name: self._prepare(name, value) for name, value in spec.kwargs.items()}
        layout: Any = spec.sharding.to_dict()
        if "ranks" in layout:  # it grows with the group, so it is stored and not sent to each worker
            layout = self.stored.prepare(layout)
        self.facts = {**spec.facts, "world_size": spec.sharding.size, "layout": layout}

    def _prepare(self, name: object, value: Any) -> Any:
        try:
            return self.stored.prepare(value)
        except NotPicklableError as error:
            raise TypeError(f"argument {name!r} of the constructor of {self._class_name!r}: {error}") from None
