# SPDX-License-Identifier: Apache-2.0
"""From what Ray raises to what a caller can act on. Decided from exception types and node liveness, never from text."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayError,
    RayTaskError,
    TaskPlacementGroupRemoved,
    UnserializableException,
    WorkerCrashedError,
)

from fairlead_placement.spi import alive_nodes

from .._members import Roster, WorkerFacts
from .._ray_private import how_it_ended
from ..exceptions import FailureKind, RemoteError, WorkerFailure
from .memory import MemoryLimit

__all__ = ["Verdicts", "as_failure", "as_failures", "explain_errors", "remote_traceback"]

_LOST = (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    OwnerDiedError,
    TaskPlacementGroupRemoved,
    WorkerCrashedError,
)


def as_failure(error: BaseException, worker: WorkerFacts) -> WorkerFailure | None:
    """What became of a worker, if this error says that it was lost."""
    return next(iter(as_failures({worker.rank: error}, {worker.rank: worker})), None)


def as_failures(errors: Mapping[int, BaseException], workers: Mapping[int, WorkerFacts]) -> list[WorkerFailure]:
    """What became of the workers that these errors, by rank, say were lost; one look at the nodes."""
    # What a method met itself, a child's death or an argument lost with its maker, is a RayTaskError too: it lives.
    said = {rank: error for rank, error in errors.items() if not isinstance(error, RayTaskError)}
    said = {rank: error for rank, error in said.items() if isinstance(error, (*_LOST, ObjectLostError))}
    alive = alive_nodes() if said else frozenset()
    judged = [_judged(error, workers[rank], alive) for rank, error in said.items()]
    return [failure for failure in judged if failure is not None]


def _judged(error: BaseException, worker: WorkerFacts, alive: Collection[str]) -> WorkerFailure | None:
    node_gone = bool(worker.node_id) and worker.node_id not in alive
    kind: FailureKind
    if isinstance(error, OutOfMemoryError):
        kind = "out-of-memory"
    elif getattr(error, "preempted", False):
        kind = "preempted"
    elif isinstance(error, (NodeDiedError, ActorUnschedulableError)) or node_gone:
        kind = "node-lost"
    elif isinstance(error, _LOST):
        kind = "killed"
    else:
        return None  # an answer can be lost otherwise than with its maker's node
    cause = " ".join(str(error).split("\n\t")[0].split())
    exit_code, signal_number = how_it_ended(error)
    return dataclasses.replace(worker.failure(kind, cause), exit_code=exit_code, signal=signal_number)


def explain_errors(errors: Mapping[int, BaseException], workers: Mapping[int, WorkerFacts]) -> BaseException:
    """One exception for what ranks that live raised, to be raised by the caller.

    Args:
        errors: what Ray raised, by rank; the first is the one that is shown.
        workers: who the ranks are.

    Returns:
        The first rank's own exception, with its type, the remote traceback as its cause, and a note for each failing
        rank; `RemoteError` if its class is not known here.
    """
    rank, first = next(iter(errors.items()))
    if type(first) is ActorUnavailableError or not isinstance(first, RayError):
        return first
    shown: BaseException = first
    cause = getattr(first, "cause", None)
    if type(cause) is RayError and (type_name := getattr(cause, "fairlead_type", None)) is not None:
        shown = RemoteError(type_name, str(cause), remote_traceback(first), rank)
        shown.__cause__ = first
    elif _is_unknown_here(first):
        shown = RemoteError(*_said_last(first), remote_traceback(first), rank)
        shown.__cause__ = first
    elif isinstance(first, RayTaskError) and isinstance(cause, BaseException):
        shown = cause
        shown.__cause__ = first
    for failing, error in errors.items():
        said = "" if error is first else f": {_type_name(error)}"
        shown.add_note(f"raised by {workers[failing]}{said}")
    return shown


def _is_unknown_here(error: BaseException) -> bool:
    """Whether an error stands for one whose class this process does not know."""
    cause = getattr(error, "cause", None)
    return isinstance(error, UnserializableException) or (isinstance(cause, RayError) and type(cause) is RayError)


def _said_last(error: BaseException) -> tuple[str, str]:
    """The full name of an exception's class and its message, from the last line of its remote traceback."""
    name, _, message = (remote_traceback(error).strip().splitlines() or ["unknown"])[-1].partition(": ")
    return name.strip(), message


def _type_name(error: BaseException) -> str:
    """The name of the class of the exception that a worker raised."""
    if _is_unknown_here(error):
        return _said_last(error)[0].rpartition(".")[2]
    return type(getattr(error, "cause", None) or error).__name__


def remote_traceback(error: Any) -> str:
    """The traceback in the worker as text, as far as Ray carries it."""
    if isinstance(error, UnserializableException):
        return str(getattr(error, "_original_stack_trace", error))
    return str(getattr(error, "traceback_str", "")) or str(error)


class Verdicts:
    """Decides which workers of a group are lost, and tells its roster.

    Args:
        roster: of the group.
        memory_limit: the limit that the nodes' agents enforce, if there is one.
    """

    def __init__(self, roster: Roster, memory_limit: MemoryLimit | None) -> None:
        self._roster = roster
        self._memory_limit = memory_limit

    def note(self, failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
        """Note that workers are dead, unless they have been replaced; return the failures to report."""
        if self._memory_limit is not None:
            failures = self._memory_limit.judge(failures, self._roster.snapshot().facts)
        return self._roster.lost(failures)

    def note_causes(self, dead: Sequence[WorkerFacts], *, within_s: float) -> None:
        """Note what dead workers died of, as far as Ray knows it and says so in time."""
        now = self._roster.snapshot()
        if now.ended:
            return
        # One that has been replaced since it was seen dead is skipped: its successor would be asked.
        unknown = [who for who in dead if now[who.rank].facts is who and now[who.rank].failure is None]
        # Of a dead actor this is answered at once, with what it died of.
        asked = {now[who.rank].handle.__ray_ready__.remote(): who for who in unknown}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=within_s) if asked else ([], [])
        errors: dict[int, BaseException] = {}
        for ref in answered:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                errors[asked[ref].rank] = error
        if failures := as_failures(errors, {who.rank: who for who in unknown}):
            self.note(failures)

    def note_dead(self, dead: Sequence[WorkerFacts], otherwise: str, *, within_s: float) -> None:
        """Note that workers are dead: with the cause if Ray says it in time, else as killed with another text."""
        self.note_causes(dead, within_s=within_s)
        lost = self._roster.snapshot().lost
        if unexplained := [who.failure("killed", otherwise) for who in dead if who.rank not in lost]:
            self.note(unexplained)
