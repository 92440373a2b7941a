# SPDX-License-Identifier: Apache-2.0
"""Verdicts on lost workers, from the types of Ray's exceptions and the liveness of nodes, never from texts."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, UnserializableException

from fairlead_placement.spi import choose_alive

from .._membership.model import WorkerProcess
from .._membership.roster import Roster
from .._ray_private import how_it_ended
from ..exceptions import FailureKind, RemoteError, WorkerFailure
from .memory import MemoryLimit

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


def as_failure(error: BaseException, worker: WorkerProcess) -> WorkerFailure | None:
    """Return the failure of a worker if this error says that the worker was lost, else None."""
    return next(iter(as_failures({worker.rank: error}, {worker.rank: worker})), None)


def as_failures(errors: Mapping[int, BaseException], workers: Mapping[int, WorkerProcess]) -> list[WorkerFailure]:
    """Return the failures of the workers that were lost according to these errors, which are given by rank."""
    # An error that a method met, such as the death of a child, is a RayTaskError too: that worker is alive.
    lost = {
        rank: error
        for rank, error in errors.items()
        if isinstance(error, (*_LOST, ray.exceptions.ObjectLostError)) and not isinstance(error, RayTaskError)
    }
    alive = set(choose_alive({workers[rank].node_id for rank in lost}) if lost else ())
    verdicts = [_judge(error, workers[rank], alive) for rank, error in lost.items()]
    return [failure for failure in verdicts if failure is not None]


def _judge(error: BaseException, worker: WorkerProcess, alive: Collection[str]) -> WorkerFailure | None:
    node_gone = bool(worker.node_id) and worker.node_id not in alive
    kind: FailureKind
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        kind = "out-of-memory"
    elif getattr(error, "preempted", False):
        kind = "preempted"
    elif isinstance(error, (ray.exceptions.NodeDiedError, ray.exceptions.ActorUnschedulableError)) or node_gone:
        kind = "node-lost"
    elif isinstance(error, _LOST):
        kind = "killed"
    else:
        return None  # an object can be lost while its worker is alive
    cause = " ".join(str(error).split("\n\t")[0].split())
    exit_code, signal_number = how_it_ended(error)
    return dataclasses.replace(worker.failure(kind, cause), exit_code=exit_code, signal=signal_number)


def explain_errors(errors: Mapping[int, BaseException], workers: Mapping[int, WorkerProcess]) -> BaseException:
    """Return one exception for the errors of ranks that are alive, to be raised to the caller.

    Returns:
        The first rank's own exception, with its type, the remote traceback as its cause, and a note for each failing
        rank; `RemoteError` if its class is not known here.
    """
    rank, first = next(iter(errors.items()))
    if type(first) is ray.exceptions.ActorUnavailableError or not isinstance(first, RayError):
        return first
    shown: BaseException = first
    cause = getattr(first, "cause", None)
    if type(cause) is RayError and (type_name := getattr(cause, "fairlead_type", None)) is not None:
        shown = RemoteError(type_name, str(cause), remote_traceback(first), rank)
    elif _is_unknown_here(first):
        shown = RemoteError(*_read_last_line(first), remote_traceback(first), rank)
    elif isinstance(first, RayTaskError) and isinstance(cause, BaseException):
        shown = cause
    if shown is not first:
        shown.__cause__ = first
    for failing, error in errors.items():
        other = "" if error is first else f": {_type_name(error)}"
        shown.add_note(f"raised by {workers[failing]}{other}")
    return shown


def _is_unknown_here(error: BaseException) -> bool:
    """Return whether an error stands for one whose class this process does not know."""
    return isinstance(error, UnserializableException) or type(getattr(error, "cause", None)) is RayError


def _read_last_line(error: BaseException) -> tuple[str, str]:
    """Return the full name of an exception's class and its message, from the last line of its remote traceback."""
    name, _, message = (remote_traceback(error).strip().splitlines() or ["unknown"])[-1].partition(": ")
    return name.strip(), message


def _type_name(error: BaseException) -> str:
    """Return the class name of the exception that a worker raised."""
    if _is_unknown_here(error):
        return _read_last_line(error)[0].rpartition(".")[2]
    return type(getattr(error, "cause", None) or error).__name__


def remote_traceback(error: Any) -> str:
    """Return the traceback in the worker as text, as far as Ray has it."""
    if isinstance(error, UnserializableException):
        return str(getattr(error, "_original_stack_trace", error))
    return str(getattr(error, "traceback_str", "")) or str(error)


class Verdicts:
    """Decide which workers of a group are lost, and note it in the roster."""

    def __init__(self, roster: Roster, memory_limit: MemoryLimit | None) -> None:
        self._roster = roster
        self._memory_limit = memory_limit

    def note(self, failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
        """Note that workers are dead, except those that have been replaced; return the failures to report."""
        if self._memory_limit is not None:
            failures = self._memory_limit.judge(failures, self._roster.snapshot())
        return self._roster.record_losses(failures)

    def note_causes(self, dead: Sequence[WorkerProcess], *, within_s: float) -> None:
        """Note the causes of death that Ray reports within `within_s`."""
        now = self._roster.snapshot()
        if now.ended:
            return
        # Skip workers that have been replaced since they were seen dead: the request would go to their successors.
        unknown = [who for who in dead if now[who.rank].process is who and now[who.rank].failure is None]
        # For a dead actor Ray answers this at once with the cause of its death.
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

    def note_dead(self, dead: Sequence[WorkerProcess], otherwise: str, *, within_s: float) -> None:
        """Note that workers are dead, with Ray's cause, or as killed with the cause `otherwise` if Ray reports none."""
        self.note_causes(dead, within_s=within_s)
        lost = self._roster.snapshot().lost
        if unexplained := [who.failure("killed", otherwise) for who in dead if who.rank not in lost]:
            self.note(unexplained)
