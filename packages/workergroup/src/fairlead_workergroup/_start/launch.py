# SPDX-License-Identifier: Apache-2.0
"""The plan of each worker, the creation of its actor, and the wait until every constructor has finished."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_sharding import NamedSharding

from .._display import Bar
from .._members import Place, WorkerFacts
from .._observe.failures import as_failure, remote_traceback
from ..exceptions import WorkerStartError
from .environment import WorkerEnvironment, WorkerPython, worker_environment
from .options import actor_options, recursive_merge_options
from .worker_class import WorkerClass


@dataclass(frozen=True)
class WorkerPlan:
    """Everything that one worker is started from, before anything is launched."""

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
    sharding: NamedSharding,
    env_vars: Mapping[str, str],
    python: WorkerPython,
) -> list[WorkerPlan]:
    """Return the options and the environment of every worker. Pure, except that it reads the driver's environment.

    Raises:
        ValueError: a worker requests something that its slot does not hold, or several threads.
    """
    class_env = dict(described.options.get("runtime_env") or {})
    of_class = {**class_env.pop("env_vars", {}), **python.variables}
    shared = {**class_env, **python.runtime_env}
    plans = []
    for place in places:
        resources, configured_env, init_kwargs, overrides = described.configuration(place.rank)
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
        coords = sharding.get_worker_coords(place.rank)
        plans.append(WorkerPlan(place, coords, options, environment, init_kwargs))
    return plans


def _rank_variables(place: Place, world_size: int, master: str) -> dict[str, str]:
    # The launcher adds MASTER_PORT, which is leased while the actors start.
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": str(place.node_rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": master,
    }


def create_actor(plan: WorkerPlan, described: WorkerClass, suffix: str) -> Any:
    """Create the actor of a worker, without a wait; return its handle.

    Args:
        plan: the plan of the worker.
        described: the class.
        suffix: makes the name unique, because Ray refuses a second actor of the same name: two groups may have the same
            prefix, two slots in different clusters the same numbers, and a rank several incarnations.
    """
    slot = plan.place.slot
    return described.actor_class.options(
        **plan.options,
        name=f"{plan.place.name}-{suffix}",
        # The group restarts workers itself: Ray's restarts hang in RESTARTING once a placement group is gone.
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            slot.placement_group, slot.bundle_index, placement_group_capture_child_tasks=True
        ),
    ).remote()


def wait_started(
    started: Sequence[ObjectRef], plans: Sequence[WorkerPlan], *, name: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Wait until all constructors have finished.

    Returns:
        The facts that each worker reports about itself, in the order of the plans.

    Raises:
        WorkerStartError: a constructor failed, or some had not finished within `timeout_s`.
    """
    began = time.monotonic()
    plan_of = dict(zip(started, plans, strict=True))
    answers: dict[ObjectRef, dict[str, Any]] = {}
    pending = list(started)
    with Bar(f"Starting {name}", len(started)) as bar:
        while pending:
            # The first failure is the cause of others that soon follow.
            first, pending = ray.wait(pending, num_returns=1, timeout=0.2)
            others, pending = ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
            for ref in [*first, *others]:
                try:
                    answers[ref] = ray.get(ref)
                except Exception as error:
                    waiting = [plan_of[other].place.rank for other in started if other not in answers and other != ref]
                    raise _start_error(error, plan_of[ref], len(answers), waiting) from error
            slow = [plan_of[ref] for ref in started if ref not in answers]
            bar.show(len(answers), waiting_for=[plan.place.rank for plan in slow])
            if pending and time.monotonic() - began >= timeout_s:
                where = ", ".join(f"{plan.facts}" for plan in slow[:8]) + (" and others" if len(slow) > 8 else "")
                raise WorkerStartError(
                    f"{len(slow)} of {len(started)} workers had not finished their constructor after {timeout_s:.4g} s "
                    f"(start_timeout_s, or the timeout of a resize): {where}"
                )
    return [answers[ref] for ref in started]


def _start_error(error: Exception, plan: WorkerPlan, started: int, waiting: Sequence[int]) -> WorkerStartError:
    lost = as_failure(error, plan.facts)
    if lost is not None:
        reason, trace = f"the worker was lost while it started: {lost.kind}: {lost.cause}", ""
    else:
        cause = getattr(error, "cause", None) or error
        reason, trace = f"its constructor raised {type(cause).__name__}: {cause}", remote_traceback(error)
    others = f"of the other {started + len(waiting)} workers {started} had started"
    if waiting:
        ranks = ", ".join(map(str, waiting[:16])) + (", ..." if len(waiting) > 16 else "")
        others += f", {len(waiting)} had not (ranks {ranks})"
    return WorkerStartError(reason, plan.place.rank, plan.coords, plan.place.slot.node_id, trace, others)
