# SPDX-License-Identifier: Apache-2.0
"""Starting the workers of a group, the first time and each time again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_sharding import NamedSharding
from fairlead_venvs import VenvSpec

from .._arguments import Arguments
from .._members import Place, Roster
from .._observe.memory import MemoryLimit
from .._observe.statistics import Counters
from .._ray_private import actor_id_of
from .._remote.process import mark_of
from .._start.environment import ready_python, start_variables
from .._start.launch import Recipe, WorkerPlan, create_actors, plan_workers, store_recipe, wait_started
from .._start.options import recursive_merge_options
from .._start.worker_class import WorkerClass, describe_class
from .resources import Resources
from .shutdown import WorkerProcess

__all__ = ["Launcher"]


class Launcher:
    """Makes the workers of a group in their slots.

    Args:
        roster: of the group.
        resources: of the group; the launcher adds what it starts.
        counters: of the group.
        cluster: where the slots are from.
        worker: the class, or its name.
        python: what the workers run in.
        env_vars: the user's variables.
        memory_limit: what the node agents enforce, if there is one.
        token: identifies the group among all groups of all drivers.
        concurrent: whether async methods overlap.
        timeout_s: how long all constructors together may take.

    Attributes:
        worker_class: the class as it was described where the workers run; set by `prepare`.
        timeout_s: as given.
        master: address and port of the store of the workers' process group; set by the first start.
    """

    worker_class: WorkerClass
    master: tuple[str, int]

    def __init__(
        self,
        roster: Roster,
        resources: Resources,
        counters: Counters,
        *,
        cluster: RayVirtualCluster | Sequence[Slot],
        worker: Any,
        python: str | VenvSpec | None,
        env_vars: Mapping[str, str],
        memory_limit: MemoryLimit | None,
        token: str,
        concurrent: bool,
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._roster = roster
        self._resources = resources
        self._counters = counters
        self._cluster = cluster
        self._worker = worker
        self._python = python
        self._env_vars = env_vars
        self._memory_limit = memory_limit
        self._token = token
        self._concurrent = concurrent
        self._plans: list[WorkerPlan] = []
        self._recipe: Recipe | None = None

    def prepare(self, places: Sequence[Place]) -> None:
        """Describe the class where the workers are to be, and plan each worker; nothing changes if that fails."""
        nodes = [place.slot.node_id for place in places]
        python = ready_python(self._python, nodes, timeout_s=self.timeout_s)
        per_node = getattr(self._cluster, "num_gpus_per_node", None)
        # The class may only be found, or its libraries loaded, with these.
        variables = start_variables(self._env_vars)
        runtime_env = recursive_merge_options(python.runtime_env, {"env_vars": variables} if variables else {})
        described = describe_class(
            self._worker,
            asks=[place.configure_ask(per_node) for place in places],
            node_id=nodes[0],
            runtime_env=runtime_env,
            timeout_s=self.timeout_s,
            concurrent=self._concurrent,
        )
        coords = [member.coords for member in self._roster.snapshot().members]
        self._plans = plan_workers(places, described, coords=coords, env_vars=self._env_vars, python=python)
        self.worker_class = described

    def store(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, sharding: NamedSharding, facts: Mapping[str, Any]
    ) -> None:
        """Store the constructor's arguments, and the facts that are the same for all workers."""
        self._recipe = recipe = store_recipe(
            self.worker_class, args, kwargs, sharding=sharding, facts=facts, token=self._token
        )
        self._counters.add(puts=recipe.stored.puts, bytes_put=recipe.stored.bytes_put)

    def release(self) -> None:
        """Let the store drop the arguments: nothing is started any more."""
        self._recipe = None

    def start(self, ranks: Sequence[int]) -> None:
        """Start the workers of these ranks, and wait until every constructor has finished.

        Raises:
            WorkerStartError: a constructor failed or took too long.
            WorkerGroupError: the group is being shut down.
        """
        recipe, resources = self._recipe, self._resources
        if recipe is None:
            raise self._roster.ended_error()
        plans = [self._plans[rank] for rank in ranks]
        incarnations = [member.incarnation for member in self._roster.snapshot().members]
        actors = create_actors(plans, self.worker_class, self._token[:6], incarnations)
        resources.workers.update(zip(ranks, actors, strict=True))
        for plan in plans:
            place = plan.place
            resources.processes[place.rank] = WorkerProcess(place.slot.node_id, mark_of(self._token, place.rank))
        # The agent that holds the port starts while the workers' processes do.
        ports = self._cluster.port_range if isinstance(self._cluster, RayVirtualCluster) else None
        lease = resources.lease_port(self._plans[0].place, ports)
        self.master = lease.address, lease.port

        configured = Arguments()
        starting = [
            recipe.start(
                actor,
                plan,
                incarnation=incarnations[plan.place.rank],
                master_port=lease.port,
                configured=configured,
            )
            for plan, actor in zip(plans, actors, strict=True)
        ]
        self._counters.add(requests=len(starting), puts=configured.puts, bytes_put=configured.bytes_put)
        answers = wait_started(starting, plans, name=self._roster.name_prefix, timeout_s=self.timeout_s)
        started = []
        for plan, actor, answer in zip(plans, actors, answers, strict=True):
            facts = dataclasses.replace(plan.facts, pid=answer["pid"], started=answer["started"])
            mark = mark_of(self._token, facts.rank)
            resources.processes[facts.rank] = WorkerProcess(answer["node_id"], mark, facts.pid, facts.started)
            started.append((actor_id_of(actor), actor, plan.place, facts))
        self._roster.record_start(started)
        if self._memory_limit is not None:
            self._memory_limit.guard([facts for *_, facts in started])
