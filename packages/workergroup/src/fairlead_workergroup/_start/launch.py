# SPDX-License-Identifier: Apache-2.0
"""The plan of each worker, the creation of its actor, and the wait until every constructor has finished."""

import itertools
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement.extension import ask_head, run_each

from .._model import Member, Place
from .._observe.progress_bar import Bar
from .._observe.query import WorkerLook
from .._observe.remote_errors import explain_missing_module, remote_traceback
from .._world import Deadline
from ..exceptions import WorkerFailure, WorkerStartError
from .environment import (
    RANK_VARIABLES,
    EnvVars,
    WorkerEnvironment,
    WorkerPython,
    forwarded_variables,
    variables_at,
    worker_environment,
)
from .options import actor_options, recursive_merge_options
from .worker_class import WorkerClass

# How many actors are requested at a time. Ray's head acknowledges each request for a named actor before the next one of
# the same thread is sent, so that a large group neither waits for every round trip nor floods the head.
WINDOW = 16
# How often the progress bar moves.
SHOWN_EVERY_S = 0.1
# How many ranks it is given; it names 8.
NAMED = 9
# How many late workers an error shows.
SHOWN = 8


@dataclass(frozen=True)
class WorkerPlan:
    """Everything that one worker is started from."""

    place: Place
    options: Mapping[str, Any]
    environment: WorkerEnvironment
    init_kwargs: Mapping[str, Any]
    of_rank: frozenset[str]  # the names of its variables that a change of the group may change


def plan_workers(
    places: Sequence[Place],
    described: WorkerClass,
    *,
    env_vars: EnvVars,
    python: WorkerPython,
) -> list[WorkerPlan]:
    """Return the options and the environment of every worker. Pure, except that it reads the driver's environment."""
    forwarded = forwarded_variables(os.environ)
    class_env = dict(described.options.get("runtime_env") or {})
    of_class = {**class_env.pop("env_vars", {}), **python.variables}
    shared = {**class_env, **python.runtime_env}
    plans = []
    given = [variables_at(env_vars, place) for place in places]
    # A worker that moves would keep a variable that its next place has no value for.
    if some := {name for variables in given for name in variables.keys() ^ given[0].keys()}:
        raise ValueError(f"env_vars must return the same names for all places; {sorted(some)} are there for some only")
    for place, of_user in zip(places, given, strict=True):
        resources, configured_env, init_kwargs, overrides = described.configuration(place.rank)
        environment = worker_environment(
            driver=forwarded,
            of_class=of_class,
            of_slot=place.slot.env,
            of_user=of_user,
            of_rank=rank_variables(place, len(places), places[0].slot.node_ip),
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
        of_rank = frozenset((*RANK_VARIABLES, *of_user)) if callable(env_vars) else frozenset(RANK_VARIABLES)
        plans.append(WorkerPlan(place, options, environment, init_kwargs, of_rank))
    return plans


def rank_variables(place: Place, world_size: int, master: str) -> dict[str, str]:
    """Return the variables of a rank, without MASTER_PORT, which is leased while the actors start."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": str(place.node_rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": master,
    }


def create_actor(plan: WorkerPlan, described: WorkerClass, name: str) -> Any:
    """Create the actor of a worker under a name as from `actor_name`, within `head_deadline`; return its handle."""
    slot = plan.place.slot
    actor_class = described.actor_class.options(
        **plan.options,
        name=name,
        # The group restarts workers itself: Ray's restarts hang in RESTARTING once a placement group is gone.
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            slot.placement_group, slot.bundle_index, placement_group_capture_child_tasks=True
        ),
    )
    return ask_head("create a worker", actor_class.remote, undo=ray.kill)


def create_actors(
    plans: Sequence[WorkerPlan], described: WorkerClass, names: Sequence[str], add: Callable[[WorkerPlan, Any], None]
) -> None:
    """Create the actors of workers, `WINDOW` at a time; call `add` with each handle, on any thread."""

    def create(request: tuple[WorkerPlan, str]) -> None:
        add(request[0], create_actor(request[0], described, request[1]))

    first, *others = zip(plans, names, strict=True)
    create(first)  # this exports the class, which has to happen once
    requested = run_each(create, others, WINDOW)
    try:
        for future in requested:
            future.result()
    finally:
        for future in requested:
            future.cancel()
        wait(requested)


def wait_started(
    started: Sequence[ObjectRef],
    members: Sequence[Member],
    *,
    name: str,
    until: Deadline,
    check: Callable[[], None],
    look: Callable[[Sequence[Member]], Sequence[WorkerLook | None]] = lambda late: [None] * len(late),
    explain: Callable[[Member, BaseException], WorkerFailure | None] = lambda member, error: None,
) -> dict[int, dict[str, Any]]:
    """Wait until all constructors have finished; return what each worker reports, by rank.

    `look` looks at workers that are late, and `explain` returns the loss of a worker, if that is what an error means.
    """
    answers: dict[int, dict[str, Any]] = {}
    began = time.monotonic()  # which fairlead-inspect reads from outside, with `name`
    pending = {member.rank: member for member in members}
    # Each answer comes once, in the order of arrival: the first failure is the cause of others that soon follow. A
    # `ray.wait` would be given all pending references again for each answer.
    arrived: queue.SimpleQueue[tuple[int, Future[dict[str, Any]]]] = queue.SimpleQueue()

    def note_arrival(rank: int, answer: Future[dict[str, Any]]) -> None:
        arrived.put((rank, answer))

    for member, ref in zip(members, started, strict=True):
        ref.future().add_done_callback(partial(note_arrival, member.rank))
    with Bar(f"Starting {name}: process, import, constructor", len(started)) as bar:
        shown_at = began
        while pending:
            try:
                rank, answer = arrived.get(timeout=until.left(at_most=SHOWN_EVERY_S))
            except queue.Empty:
                check()
                if until.passed:
                    slow = list(pending.values())
                    raise late_error(slow, look(slow[:SHOWN]), len(started), until.limit_s or 0.0) from None
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


def late_error(
    slow: Sequence[Member], looks: Sequence[WorkerLook | None], workers: int, timeout_s: float
) -> WorkerStartError:
    """Return the error about workers that have not started in time, given the looks at the first of them."""
    lines = [_describe_start(member, seen) for member, seen in zip(slow, looks, strict=False)]
    lines += [f"and {len(slow) - len(lines)} others"] if len(slow) > len(lines) else []
    return WorkerStartError(
        f"{len(slow)} of {workers} workers had not finished their constructor after {timeout_s:.4g} s. Give them more "
        "time (timeout_s of launch, Timeouts.start_s of a group, the timeout of a resize), or look at what they wait "
        "for:" + "".join(f"\n  {line}" for line in lines)
    )


def _describe_start(member: Member, seen: WorkerLook | None) -> str:
    """Return what a late worker is doing."""
    if seen is None:
        return f"{member}: its node does not answer"
    if not seen.pid:
        return f"{member}: Ray has not started its process"
    return f"{replace(member, pid=seen.pid)}: " + (f"at {seen.where}" if seen.where else "its process is starting")


def start_error(
    error: BaseException, member: Member, started: int, waiting: Sequence[int], loss: WorkerFailure | None
) -> WorkerStartError:
    """Return the error about a worker whose constructor has raised an error, or that was lost."""
    if loss is not None:
        reason, trace = f"the worker was lost while it started: {loss.kind}: {loss.cause}", ""
    else:
        cause = getattr(error, "cause", None) or error
        reason, trace = f"its constructor raised {type(cause).__name__}: {cause}", remote_traceback(error)
        if missing := explain_missing_module(cause):
            reason = missing
        elif isinstance(cause, TypeError) and "() " in reason and "argument" in reason:
            reason += ". The constructor gets init_args and init_kwargs of launch, or the arguments of RayWorkerBuilder"
    others = f"of the other {started + len(waiting)} workers {started} had started"
    if waiting:
        ranks = ", ".join(map(str, waiting[:16])) + (", ..." if len(waiting) > 16 else "")
        others += f", {len(waiting)} had not (ranks {ranks})"
    return WorkerStartError(reason, member.rank, dict(member.coords), member.node_id, trace, others)
