# SPDX-License-Identifier: Apache-2.0
"""The evidence about processes: what Ray's errors and tables, their nodes and the memory guards say of them.

It follows from the types of errors; what Ray reports only in their texts, `_ray_private` reads. No other module reads
which actors are dead. What errors say is found out without a request to Ray's head, which may be silent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from fairlead_placement import HeadTimeoutError
from fairlead_placement.extension import choose_alive, collect, head_deadline

from .. import _world
from .._membership.judge import Evidence, Judge, Verdict
from .._membership.model import Member, WorkerProcess
from .._ray_private import how_it_ended, is_known_dead, lost_with
from .._remote.process import find_ended
from ..exceptions import FailureKind
from .head import dead_actors
from .memory import find_killed
from .query import ask_nodes

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
# A node that does not answer in this time is not waited for. A very busy one answers in seconds.
LOOK_S = 5.0
# While an error is made, nodes may take this long to say which processes have ended.
ENDED_S = 1.0
# How soon a process that has refused a request is looked at again.
REFUSED_EVERY_S = 0.1
NO_CAUSE = "Ray reports that it is dead, and has not reported the cause in time"
NOT_NOTICED = "its process has ended, and Ray has not noticed: a process that it forked may hold its connections"


def evidence_of(error: BaseException | None) -> Evidence | None:
    """Return what the error of a request says about the worker; None for an error that says nothing about it."""
    # An error that a method met, such as the death of a child, is a RayTaskError too: that worker is alive.
    if isinstance(error, RayTaskError) or not isinstance(error, (*_LOST, *_SILENT)):
        return None
    cause = " ".join(str(error).split("\n\t")[0].split())
    if not isinstance(error, _LOST):
        return Evidence("ray-error", "silent", text=cause)
    code, signal = how_it_ended(error)
    kind: FailureKind = "killed" if code is None else "exited"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        kind = "out-of-memory"
    elif getattr(error, "preempted", False):
        kind = "preempted"
    elif isinstance(error, _NODE_LOST) or lost_with(error) == "node":
        kind = "node-lost"
    elif isinstance(error, _SHUT_DOWN) or lost_with(error) == "owner":
        kind = "shut-down"
    return Evidence("ray-error", "gone", kind, cause, code, signal)


def tells_of_a_loss(error: BaseException) -> bool:
    """Return whether an error says that its worker is lost."""
    return (evidence := evidence_of(error)) is not None and evidence.says == "gone"


def find_evidence(errors: Mapping[WorkerProcess, BaseException]) -> dict[WorkerProcess, list[Evidence]]:
    """Return what errors say about their workers."""
    return {worker: [one] for worker, error in errors.items() if (one := evidence_of(error)) is not None}


def _node_lost() -> Evidence:
    return Evidence("node", "gone", "node-lost", "its node is lost")


def _on_lost_nodes(workers: Iterable[WorkerProcess]) -> list[WorkerProcess]:
    workers = [worker for worker in workers if worker.node_id]
    alive = set(choose_alive({worker.node_id for worker in workers}) if workers else ())
    return [worker for worker in workers if worker.node_id not in alive]


def judge_errors(
    judge: Judge,
    errors: Mapping[WorkerProcess, BaseException],
    *,
    silent: Iterable[WorkerProcess] = (),
    within_s: float = ENDED_S,
) -> list[Verdict]:
    """Tell a judge what errors say; return its verdicts on the workers that are lost.

    If the errors tell of no death, their nodes are asked which processes have ended: of workers that have refused a
    request, and of the `silent` ones, which have not replied. A process that exits refuses requests before it has
    ended, so it is looked at until it has, for `within_s` at most. Only guards are asked about workers known as lost.
    """
    for worker, evidence in find_evidence(errors).items():
        judge.tell(worker, *evidence)
    verdicts = judge.ask(errors, look="known")
    lost = {worker: known for worker, known in verdicts.items() if known.is_lost}
    if lost:
        return list(judge.ask(lost, look="guard", within_s=within_s).values())
    refused = [worker for worker, known in verdicts.items() if known.is_doubted]
    until = _world.current.now() + within_s
    if starting := [worker for worker in refused if not worker.pid]:  # no node knows their processes
        found = judge.ask(starting, look="cause", within_s=within_s)
        lost |= {worker: known for worker, known in found.items() if known.is_lost}
    asked = [*(one for one in refused if one.pid), *(worker for worker in silent if worker not in verdicts)]
    while asked and (left := until - _world.current.now()) > 0:
        found = judge.ask(asked, look="node", within_s=left)
        lost |= {worker: known for worker, known in found.items() if known.is_lost}
        asked = [worker for worker in refused if worker.pid and worker not in lost]
        if lost or not asked:
            break
        _world.current.event().wait(min(REFUSED_EVERY_S, left))
    if lost and (left := until - _world.current.now()) > 0:
        lost |= judge.ask(lost, look="cause", within_s=left)  # what only the node has noticed, Ray may notice soon
    return list(lost.values())


def find_known_dead(members: Iterable[Member]) -> list[WorkerProcess]:
    """Return the workers that this process knows to be dead and the group does not, without a request.

    So it is when a user's `ray.get` has met a death: nobody has told the group. A restart that is under way ends
    workers itself.
    """
    return [
        member.process
        for member in members
        if member.failure is None
        and not member.restarting
        and member.handle is not None
        and is_known_dead(member.handle)
    ]


def judge_known_dead(judge: Judge, dead: Sequence[WorkerProcess]) -> list[Verdict]:
    """Tell a judge of workers that this process knows to be dead; return its verdicts, with the causes."""
    for worker in dead:
        judge.tell(worker, Evidence("actor-state", "gone", text=NO_CAUSE))
    return list(judge.ask(dead, look="all", within_s=LOOK_S).values())


def weigh_answers(
    workers: Sequence[WorkerProcess], ended: Sequence[bool | None]
) -> dict[WorkerProcess, list[Evidence]]:
    """Return what the answers of nodes say: whether each process has ended, None if its node does not answer."""

    def weigh(answer: bool | None) -> Evidence:
        if answer is None:
            return Evidence("process", "silent", text="its node does not answer")
        return Evidence("process", "gone", text=NOT_NOTICED) if answer else Evidence("process", "alive")

    return {worker: [weigh(answer)] for worker, answer in zip(workers, ended, strict=True)}


def check_head(verdicts: Iterable[Verdict], *, since: float) -> None:
    """Raise HeadTimeoutError if Ray's head was silent at a look since then."""
    for one in (one for verdict in verdicts for one in verdict.evidence):
        if (one.source, one.says) == ("actor-state", "silent") and one.at >= since:
            raise HeadTimeoutError(one.text)


class RayWitnesses:
    """The sources that the judge of a group asks."""

    def __init__(self, find_handle: Callable[[WorkerProcess], Any | None], *, memory_limit: bool = False) -> None:
        """Take what returns the handle of a process, or None if there is none to ask, and whether memory is limited."""
        self._find_handle = find_handle
        self._memory_limit = memory_limit

    def head(self, workers: Sequence[WorkerProcess], within_s: float) -> dict[WorkerProcess, list[Evidence]]:
        """Look at the actors and nodes that Ray's head knows to be dead."""
        try:
            with head_deadline(within_s):
                dead = dead_actors()  # all actors of the job that have ever died
        except HeadTimeoutError as error:
            return {worker: [Evidence("actor-state", "silent", text=str(error))] for worker in workers}
        found = {
            worker: [Evidence("actor-state", "gone", text=NO_CAUSE)] for worker in workers if worker.actor_id in dead
        }
        for worker in _on_lost_nodes(workers):
            found.setdefault(worker, []).append(_node_lost())
        return found

    def node(self, workers: Sequence[WorkerProcess], within_s: float) -> dict[WorkerProcess, list[Evidence]]:
        """Look at the processes, with one request to each node; Ray may not know yet that they have ended."""
        started = [worker for worker in workers if worker.pid]
        ended = ask_nodes(started, find_ended, within_s=min(within_s, LOOK_S), asks_head=False)
        return weigh_answers(started, ended)

    def ray(self, workers: Sequence[WorkerProcess], within_s: float) -> dict[WorkerProcess, list[Evidence]]:
        """Send a request to each actor, whose error names the cause if Ray knows that the actor is dead."""
        handles = {worker: handle for worker in workers if (handle := self._find_handle(worker)) is not None}
        try:
            answers = collect({one: handle.__ray_ready__.remote for one, handle in handles.items()}, within_s)
        except ray.exceptions.RaySystemError:
            return {}  # another thread has shut Ray down, and nobody is left to ask
        return find_evidence({one: error for one, (_, error) in answers.items() if error is not None})

    def guard(self, workers: Sequence[WorkerProcess], within_s: float) -> dict[WorkerProcess, list[Evidence]]:
        """Read which workers their reapers have ended for their memory, on their nodes."""
        causes = find_killed(workers, within_s) if self._memory_limit else {}
        return {one: [Evidence("memory-guard", "gone", "out-of-memory", cause)] for one, cause in causes.items()}
