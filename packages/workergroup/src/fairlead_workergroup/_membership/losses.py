# SPDX-License-Identifier: Apache-2.0
"""Which workers are lost, and why: from the errors of their replies, their nodes, and Ray's tables.

The cause is in this order that of the memory guard, of Ray's error, of what Ray's head or the node of the process says.
While an error is made for a caller, nothing is asked of Ray's head, which may be silent.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayTaskError

from fairlead_placement.extension import choose_alive, collect, head_deadline

from .. import _replies as replies
from .. import _world
from .._model import Member
from .._observe.query import ask_nodes, dead_actors, find_killed
from .._observe.remote_errors import explain_errors, explain_missing_module, remote_traceback
from .._ray_private import how_it_ended, is_known_dead, lost_with
from .._remote.process import find_ended
from .._remote.stacks import find_innermost
from .._world import NEVER, Deadline
from ..exceptions import FailureKind, StaleGroupError, WorkerFailure, WorkerStartError
from .core import Core

_LOST = (
    ray.exceptions.ActorDiedError,
    ray.exceptions.ActorPlacementGroupRemoved,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.TaskPlacementGroupRemoved,
    ray.exceptions.WorkerCrashedError,
)
_NODE_LOST = (ray.exceptions.NodeDiedError, ray.exceptions.ActorUnschedulableError)
_SHUT_DOWN = (
    ray.exceptions.ActorPlacementGroupRemoved,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.TaskPlacementGroupRemoved,
)
# An object can be lost while its worker is alive, and a worker be out of reach.
_SILENT = (ray.exceptions.ObjectLostError, ray.exceptions.ActorUnavailableError)
# While an error is made, nodes may take this long to say which processes have ended.
ENDED_S = 1.0
REFUSED_EVERY_S = 0.1  # how soon a process that has refused a request is looked at again
# Once a worker is known to be dead, the errors of others that have died with it are waited for until none has come for
# this long. Ray reports three deaths within about 20 ms, and within more than 0.1 s if all CPUs are taken.
TOGETHER_S = 0.3
# A node that does not answer in this time is not waited for. A very busy one answers in seconds.
LOOK_S = 5.0
# Ray reports the cause of a death that it knows at once, and may take this time to notice one.
CAUSE_S = 5.0
# How many late workers an error shows.
SHOWN = 8
NO_CAUSE = "Ray reports that it is dead, and has not reported the cause in time"
NOT_NOTICED = "its process has ended, and Ray has not noticed: a process that it forked may hold its connections"

Losses = dict[Member, WorkerFailure]


def read_loss(member: Member, error: BaseException | None, *, is_ending: bool = False) -> WorkerFailure | None:
    """Return the loss that the error of a request to a worker reports, or None; `is_ending` if its group shuts down."""
    # An error that a method met, such as the death of a child, is a RayTaskError too: that worker is alive.
    if error is None or isinstance(error, RayTaskError) or not isinstance(error, _LOST):
        return None
    code, signal = how_it_ended(error)
    kind: FailureKind = "killed" if code is None else "exited"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        kind = "out-of-memory"
    elif getattr(error, "preempted", False):
        kind = "preempted"
    elif isinstance(error, _NODE_LOST) or lost_with(error) == "node":
        kind = "node-lost"
    elif isinstance(error, _SHUT_DOWN) or lost_with(error) in ("owner", *(["ray.kill"] if is_ending else [])):
        kind = "shut-down"
    cause = " ".join(str(error).split("\n\t")[0].split())
    return replace(member.failure(kind, cause), exit_code=code, signal=signal)


def find_losses(
    core: Core,
    errors: Mapping[Member, BaseException],
    *,
    silent: Iterable[Member] = (),
    within_s: float = ENDED_S,
) -> Losses:
    """Return the workers that are lost, given the errors of their replies.

    If the errors tell of no death, nodes are asked which processes have ended: of workers that have refused a request,
    and of the `silent` ones, which have not replied. A process that exits refuses requests before it has ended, so it
    is looked at until it has, for `within_s` at most.
    """
    losses = {member: read_loss(member, error, is_ending=core.ending) for member, error in errors.items()}
    if lost := {member: loss for member, loss in losses.items() if loss is not None}:
        return _ask_guards(core, lost, within_s)
    refused = [
        member for member, error in errors.items() if isinstance(error, _SILENT) and not isinstance(error, RayTaskError)
    ]
    until = _world.current.now() + within_s
    if starting := [member for member in refused if not member.pid]:  # no node knows their processes
        lost = _ask_actors(core, starting, within_s)
    asked = [*(member for member in refused if member.pid), *(member for member in silent if member not in errors)]
    unknown: Losses = {}
    while asked and (left := until - _world.current.now()) > 0:
        unknown |= _look_at_nodes(asked, left)
        asked = [member for member in refused if member.pid and member not in unknown]
        if unknown or not asked:
            break
        _world.current.event().wait(min(REFUSED_EVERY_S, left))
    return lost | explain(core, unknown, until - _world.current.now())


def explain(core: Core, lost: Mapping[Member, WorkerFailure], within_s: float) -> Losses:
    """Return the causes of losses that the actors and the memory guards know, in place of the given ones."""
    known = dict(lost)
    if lost and within_s > 0:
        known |= _ask_actors(core, lost, within_s)
    return _ask_guards(core, known, within_s)


def find_lost(core: Core, members: Iterable[Member], within_s: float) -> Losses:
    """Return the workers among living ones that are dead now, also those that no call has met."""
    living = [member for member in members if member.lost is None]
    with head_deadline(within_s):
        noticed = look_at_head(living)
    silent = _look_at_nodes([member for member in living if member not in noticed], min(within_s, LOOK_S))
    lost = explain(core, noticed | silent, within_s)
    # Ray may say "killed" of workers whose nodes it knows to be lost.
    on_lost_nodes = {member: loss for member, loss in noticed.items() if loss.kind == "node-lost"}
    return lost | {member: loss for member, loss in on_lost_nodes.items() if lost[member].kind == "killed"}


def look_at_head(members: Collection[Member]) -> Losses:
    """Return the workers that Ray's head knows to be dead, or whose nodes it knows to be lost, without causes."""
    dead = dead_actors()  # all actors of the job that have ever died
    alive = {"", *choose_alive({member.node_id for member in members if member.node_id})}
    lost = [member for member in members if member.node_id not in alive]
    killed = {member: member.failure("killed", NO_CAUSE) for member in members if member.actor_id in dead}
    return killed | {member: member.failure("node-lost", "its node is lost") for member in lost}


def note_known_dead(core: Core, ranks: Iterable[int]) -> None:
    """Record deaths that a user's `ray.get` of futures has met, so that the next call raises them.

    A restart that is under way ends workers itself.
    """
    now, called = core.check_alive(), set(ranks)
    dead = {
        member: member.failure("killed", NO_CAUSE)
        for member in now.members
        if member.rank in called
        and member.lost is None
        and member.rank not in now.restarting
        and is_known_dead(member.handle)
    }
    if dead:
        core.note(explain(core, dead, LOOK_S).items())


def diagnose(
    refs: Sequence[ObjectRef[Any]],
    first: BaseException,
    core: Core | None,
    method: str = "",
    deadline: Deadline = NEVER,
) -> BaseException:
    """Return the exception to raise for a fetch that failed: the loss of all that are lost, or a worker's own."""
    if isinstance(first, ray.exceptions.RayError):
        first.__traceback__ = None  # Ray's frames and ours: the traceback in the worker is in the text
        first.__suppress_context__ = True  # the error of another worker, with a traceback of its own
    if core is None or not refs:
        return first
    replies.ignore(refs)
    failed, pending = _find_errors(refs, core)
    known, until = 0, NEVER
    while pending and (count := sum(read_loss(*item) is not None for item in failed.items())) and not until.passed:
        if count > known:
            known, until = count, Deadline.after(TOGETHER_S)
        replies.wait(replies.wait(refs)[1], until.left(), first=True)
        failed, pending = _find_errors(refs, core)
    # When a worker dies, the workers that communicate with it fail too, and their errors may arrive before Ray knows.
    # Otherwise it is the transfer of a value that has failed, and says nothing about those that have not finished.
    silent = pending if isinstance(first, RayTaskError) else ()
    lost = find_losses(core, failed, silent=silent, within_s=deadline.left(at_most=ENDED_S) or 0.0)
    if lost:
        # Others may be known to be dead although their replies have come, or cannot be read in time.
        actor_ids = {replies.actor_of(ref) for ref in refs}
        known_dead = ((member, member.lost) for member in core.now.members if member.actor_id in actor_ids)
        lost |= {member: loss for member, loss in known_dead if loss is not None}
        failure = core.failure_error(core.note(sorted(lost.items(), key=lambda item: item[0].rank)))
        if isinstance(failure, StaleGroupError):  # the call was sent, so that any of them may have run it
            failure = replace(failure, ran=tuple(sorted({core.member_of(ref).rank for ref in refs})))
        failure.__cause__ = next(iter(failed.values()), first)
        return failure
    return explain_errors(failed, method) if failed else first


def _find_errors(refs: Sequence[ObjectRef[Any]], core: Core) -> tuple[dict[Member, BaseException], list[Member]]:
    """Return the errors of the workers that have failed, by rank, and the workers that have not finished."""
    done, pending = replies.wait(refs)
    failed: dict[Member, BaseException] = {}
    for ref in done:
        member, error = core.find(replies.actor_of(ref)), replies.error_of(ref)
        if member is not None and error is not None:
            failed.setdefault(member, error)
    silent = [member for ref in pending if (member := core.find(replies.actor_of(ref))) is not None]
    return dict(sorted(failed.items(), key=lambda item: item[0].rank)), silent


def _look_at_nodes(members: Iterable[Member], within_s: float) -> Losses:
    """Return the workers whose processes have ended, from one request to each node, or that Ray knows to be dead."""
    started = [member for member in members if member.pid]
    ended = ask_nodes(started, find_ended, within_s=within_s, asks_head=False)
    lost = (member for member, gone in zip(started, ended, strict=True) if gone or is_known_dead(member.handle))
    return {member: member.failure("killed", NOT_NOTICED) for member in lost}


def _ask_actors(core: Core, members: Iterable[Member], within_s: float) -> Losses:
    """Send a request to each actor, whose error names the cause if Ray knows that the actor is dead."""
    if core.now.phase == "ended":
        return {}
    sends = {member: member.handle.__ray_ready__.remote for member in members if member.handle is not None}
    try:
        answers = collect(sends, min(within_s, CAUSE_S))
    except ray.exceptions.RaySystemError:
        return {}  # another thread has shut Ray down, and nobody is left to ask
    return {member: loss for member, (_, error) in answers.items() if (loss := read_loss(member, error)) is not None}


def _ask_guards(core: Core, lost: Losses, within_s: float) -> Losses:
    """Return losses with the kind and the cause of those that the memory guards of the nodes have ended."""
    killed = [member for member, loss in lost.items() if loss.kind == "killed"]
    if not core.memory_limit or not killed:
        return lost
    causes = find_killed(killed, within_s)
    return lost | {member: member.failure("out-of-memory", cause) for member, cause in causes.items()}


# Errors of starts.


def late_error(slow: Sequence[Member], looks: Sequence[Any], workers: int, timeout_s: float) -> WorkerStartError:
    """Return the error about workers that have not started in time, given the looks at the first of them."""
    lines = [_describe_start(member, seen) for member, seen in zip(slow, looks, strict=False)]
    lines += [f"and {len(slow) - len(lines)} others"] if len(slow) > len(lines) else []
    return WorkerStartError(
        f"{len(slow)} of {workers} workers had not finished their constructor after {timeout_s:.4g} s. Give them more "
        "time (timeout_s of launch, Timeouts.start_s of a group, the timeout of a resize), or look at what they wait "
        "for:" + "".join(f"\n  {line}" for line in lines)
    )


def _describe_start(member: Member, seen: Mapping[str, Any] | None) -> str:
    if seen is None:
        return f"{member}: its node does not answer"
    if not seen["pid"]:
        return f"{member}: Ray has not started its process"
    where = find_innermost(seen["stacks"])
    return f"{replace(member, pid=seen['pid'])}: " + (f"at {where}" if where else "its process is starting")


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
    others = f"of the others, {started} had started"
    if waiting:
        others += f", {len(waiting)} had not (ranks {', '.join(map(str, waiting[:16]))}{', ...' * (len(waiting) > 16)})"
    return WorkerStartError(reason, member.rank, dict(member.coords), member.node_id, trace, others)
