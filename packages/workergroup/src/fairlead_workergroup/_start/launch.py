# SPDX-License-Identifier: Apache-2.0
"""Making the actors of a group, and waiting until every constructor has finished."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_sharding import NamedSharding

from .._arguments import Arguments, NotPicklableError
from .._display import Bar
from .._members import Place, WorkerFacts
from .._observe.failures import as_failure, remote_traceback
from .._remote.process import mark_of
from ..exceptions import WorkerStartError
from .environment import WorkerEnvironment, WorkerPython, worker_environment
from .options import actor_options, recursive_merge_options
from .worker_class import WorkerClass

__all__ = ["Recipe", "WorkerPlan", "create_actors", "plan_workers", "store_recipe", "wait_started"]


@dataclass(frozen=True)
class WorkerPlan:
    """Everything one worker is made from, before anything is launched."""

    place: Place
    coords: Mapping[str, int]
    options: Mapping[str, Any]
    environment: WorkerEnvironment
    init_kwargs: Mapping[str, Any]

    @property
    def facts(self) -> WorkerFacts:
        """The identity of the worker, as far as it is known before it starts."""
        return self.place.facts(self.coords)


def plan_workers(
    places: Sequence[Place],
    described: WorkerClass,
    *,
    coords: Sequence[Mapping[str, int]],
    env_vars: Mapping[str, str],
    python: WorkerPython,
) -> list[WorkerPlan]:
    """Options and environment of every worker. Pure but for the driver's environment.

    Raises:
        ValueError: a worker asks for what its slot does not hold, or for several threads.
    """
    class_env = dict(described.options.get("runtime_env") or {})
    of_class = {**class_env.pop("env_vars", {}), **python.variables}
    shared = {**class_env, **python.runtime_env}
    plans = []
    for place in places:
        configured = described.configuration(place.rank)
        resources, configured_env, init_kwargs, overrides = configured
        environment = worker_environment(
            driver=os.environ,
            of_class=of_class,
            of_slot=place.slot.env,
            of_user=env_vars,
            of_rank=_rank_variables(place, len(places), places[0].slot.node_ip),
            configured={**overrides.get("env_vars", {}), **configured_env},
        )
        runtime_env = recursive_merge_options(shared, {n: v for n, v in overrides.items() if n != "env_vars"})
        if environment.loader_variables:
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **environment.loader_variables}
        options = actor_options(
            place.slot,
            of_class=described.options,
            resources=resources,
            runtime_env=runtime_env,
            concurrent=described.concurrent,
        )
        plans.append(WorkerPlan(place, coords[place.rank], options, environment, init_kwargs))
    return plans


def _rank_variables(place: Place, world_size: int, master: str) -> dict[str, str]:
    # MASTER_PORT is leased while the actors start, and added then.
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": str(place.node_rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": master,
    }


def create_actors(
    plans: Sequence[WorkerPlan], described: WorkerClass, group_id: str, incarnations: Sequence[int]
) -> list[Any]:
    """Launch the actors; returns at once, with a handle for each plan."""
    return [
        described.actor_class.options(
            **plan.options,
            # Ray refuses a second actor of one name: two groups may have the same prefix, two slots the same numbers
            # in clusters of their own, and a rank several lives.
            name="-".join(map(str, (plan.place.name, group_id, plan.place.rank, incarnations[plan.place.rank]))),
            # The group restarts workers itself: Ray's restarts stay RESTARTING for ever once a placement group is gone.
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                plan.place.slot.placement_group,
                plan.place.slot.bundle_index,
                placement_group_capture_child_tasks=True,
            ),
        ).remote()
        for plan in plans
    ]


def wait_started(
    started: Sequence[ObjectRef], plans: Sequence[WorkerPlan], *, name: str, timeout_s: float
) -> list[dict[str, Any]]:
    """What every worker said of itself, for each plan, once all constructors have finished.

    Raises:
        WorkerStartError: the first that failed, or that some had not finished within `timeout_s`.
    """
    began = time.monotonic()
    at_of = {ref: at for at, ref in enumerate(started)}
    answers: dict[int, dict[str, Any]] = {}
    pending = list(started)
    with Bar(f"Starting {name}", len(started)) as bar:
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=0.2)
            more, pending = ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
            for ref in [*done, *more]:
                at = at_of[ref]
                try:
                    answers[at] = ray.get(ref)
                except Exception as error:
                    waiting = [plans[at_of[other]].place.rank for other in started if at_of[other] not in answers]
                    others = _others(len(answers), waiting, failed=plans[at].place.rank)
                    raise _not_started(error, plans[at], others) from error
            slow = [plans[at] for at in sorted(at_of[ref] for ref in pending)]
            bar.show(len(answers), waiting_for=[plan.place.rank for plan in slow])
            if pending and time.monotonic() - began >= timeout_s:
                where = ", ".join(f"{plan.facts}" for plan in slow[:8]) + (" and others" if len(slow) > 8 else "")
                raise WorkerStartError(
                    f"{len(slow)} of {len(started)} workers had not finished their constructor after {timeout_s:g} s "
                    f"(start_timeout_s): {where}"
                )
    return [answers[at] for at in range(len(started))]


def _not_started(error: Exception, plan: WorkerPlan, others: str) -> WorkerStartError:
    lost = as_failure(error, plan.facts)
    if lost is not None:
        reason = f"the worker was lost while it started: {lost.kind}: {lost.cause}"
    else:
        cause = getattr(error, "cause", None) or error
        reason = f"its constructor raised {type(cause).__name__}: {cause}"
    trace = "" if lost is not None else remote_traceback(error)
    return WorkerStartError(reason, plan.place.rank, plan.coords, plan.place.slot.node_id, trace, others)


def _others(started: int, waiting: Sequence[int], *, failed: int) -> str:
    waiting = [rank for rank in waiting if rank != failed]
    ranks = ", ".join(map(str, waiting[:16])) + (", ..." if len(waiting) > 16 else "")
    had_not = f", {len(waiting)} had not (ranks {ranks})" if waiting else ""
    return f"of the other {started + len(waiting)} workers {started} had started{had_not}"


@dataclass(frozen=True)
class Recipe:
    """The constructor's arguments and the facts of all workers, stored once for as long as the group lives.

    Attributes:
        args: positional arguments of the constructor.
        kwargs: keyword arguments.
        target: what the class is loaded from.
        facts: what every worker is told, whatever its rank.
        token: identifies the group among all groups of all drivers.
        stored: the references that keep all of it in the store, and what they cost.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any
    facts: Mapping[str, Any]
    token: str
    stored: Arguments

    def start(
        self, actor: Any, plan: WorkerPlan, *, incarnation: int, master_port: int, configured: Arguments
    ) -> ObjectRef:
        """Have an actor make its worker; a ref of what it says of itself.

        Args:
            actor: its handle.
            plan: what it is to be.
            incarnation: how often its rank has been started before.
            master_port: the group's.
            configured: what stores the values that `configure_worker` adds, to be kept until the worker has started;
                the same for all that start together: it tells values by identity.
        """
        facts = {
            **self.facts,
            "rank": plan.place.rank,
            "name": plan.place.name,
            "coords": dict(plan.coords),
            "incarnation": incarnation,
            "tree": f"{mark_of(self.token, plan.place.rank)}{incarnation}",
            "env": {**plan.environment.variables, "MASTER_PORT": str(master_port)},
            "path": list(plan.environment.path),
        }
        more = {name: configured.prepare(value) for name, value in plan.init_kwargs.items()}
        # Nested, so that Ray leaves the references alone: the host fetches them once the environment is set.
        ref: ObjectRef = actor._fairlead_start.remote(facts, [self.target], list(self.args), {**self.kwargs, **more})
        return ref


def store_recipe(
    described: WorkerClass,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    sharding: NamedSharding,
    facts: Mapping[str, Any],
    token: str,
) -> Recipe:
    """Store what all workers are made from.

    Raises:
        TypeError: an argument of the constructor cannot be pickled.
    """
    stored = Arguments()

    def argument(name: object, value: Any) -> Any:
        try:
            return stored.prepare(value)
        except NotPicklableError as error:
            raise TypeError(f"argument {name!r} of the constructor of {described.name!r}: {error}") from None

    layout: Any = sharding.to_dict()
    if "ranks" in layout:  # it grows with the group: stored, not sent to each worker
        layout = stored.prepare(layout)
    return Recipe(
        args=[argument(at, value) for at, value in enumerate(args)],
        kwargs={name: argument(name, value) for name, value in kwargs.items()},
        target=stored.prepare(described.target),
        facts={**facts, "world_size": sharding.size, "layout": layout},
        token=token,
        stored=stored,
    )
