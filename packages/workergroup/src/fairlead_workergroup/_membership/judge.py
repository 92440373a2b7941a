# SPDX-License-Identifier: Apache-2.0
"""The one judge of death: what is known about each process of a group, and what follows from it.

`decide` is a pure function. `Judge` remembers evidence, and asks its witnesses for more. Neither knows Ray.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from .. import _world
from ..exceptions import FailureKind, WorkerFailure
from .model import WorkerProcess

Source = Literal["memory-guard", "user", "ray-error", "node", "actor-state", "process"]
Says = Literal["alive", "gone", "silent"]
Look = Literal["known", "guard", "cause", "head", "node", "all"]

# The cause is the text of the first of these sources that gives one.
_SOURCES: tuple[Source, ...] = ("memory-guard", "user", "ray-error", "node", "actor-state", "process")
# These two sources know what ended the process. Otherwise the first of these kinds that a source names is the kind.
_KNOW_THE_KIND = frozenset({"memory-guard", "user"})
_KINDS: tuple[FailureKind, ...] = ("out-of-memory", "preempted", "node-lost", "shut-down", "exited", "killed")
# Ray may take this long to notice a death that the node has noticed.
NOTICED_S = 2.0


@dataclass(frozen=True)
class Evidence:
    """The statement of one source about one process.

    Attributes:
        source: the source.
        says: "alive", "gone", or "silent" if it did not answer, or if its answer fits both.
        kind: of the loss, for "gone"; None stands for "killed".
        text: the cause, or why there is no answer.
        exit_code: of the process, if that is known.
        signal: the signal that ended it, if that is known.
        at: when it was said.
    """

    source: Source
    says: Says
    kind: FailureKind | None = None
    text: str = ""
    exit_code: int | None = None
    signal: int | None = None
    at: float = field(default_factory=lambda: _world.current.now())


@dataclass(frozen=True)
class Verdict:
    """The sum of the evidence about one process. "unknown" is never treated as lost, and "lost" is final."""

    worker: WorkerProcess
    state: Literal["alive", "lost", "unknown"]
    kind: FailureKind | None
    cause: str
    exit_code: int | None
    signal: int | None
    evidence: tuple[Evidence, ...]

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone."""
        return self.state == "lost"

    @property
    def is_doubted(self) -> bool:
        """Whether there is evidence against it being alive."""
        return self.state != "alive" and bool(self.evidence)

    def names(self, *sources: Source) -> bool:
        """Return whether one of these sources says that it is gone."""
        return any(one.source in sources and one.says == "gone" for one in self.evidence)

    def failure(self) -> WorkerFailure:
        """Return the report of the loss."""
        report = self.worker.failure(self.kind or "killed", self.cause)
        return replace(report, exit_code=self.exit_code, signal=self.signal)


def decide(worker: WorkerProcess, evidence: Iterable[Evidence]) -> Verdict:
    """Return the verdict on a process; the order of the evidence does not matter.

    It is lost if any source says that it is gone, whatever others say. Otherwise the latest evidence decides.
    """
    known = tuple(sorted(evidence, key=_order))
    gone = [one for one in known if one.says == "gone"]
    if gone:
        kinds = [one.kind or "killed" for one in gone]
        kind = kinds[0] if gone[0].source in _KNOW_THE_KIND else min(kinds, key=_rank)
        cause = next((one.text for one in gone if one.text), "its process has ended")
        ended = next((one for one in gone if (one.exit_code, one.signal) != (None, None)), gone[0])
        return Verdict(worker, "lost", kind, cause, ended.exit_code, ended.signal, known)
    last = max(known, key=lambda one: (one.at, one.says == "alive"), default=None)
    if last is not None and last.says == "alive":
        return Verdict(worker, "alive", None, "", None, None, known)
    return Verdict(worker, "unknown", None, "" if last is None else last.text, None, None, known)


def _order(one: Evidence) -> tuple[Any, ...]:
    return _SOURCES.index(one.source), one.at, one.says, one.text, one.kind or "", one.exit_code or 0, one.signal or 0


def _rank(kind: FailureKind) -> int:
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


Findings = Mapping[WorkerProcess, Sequence[Evidence]]
Witness = Callable[[Sequence[WorkerProcess], float], Findings]


class Witnesses(Protocol):
    """The sources that a judge asks; each says what it learned within some seconds, and never raises for silence."""

    # The tables of Ray's head.
    def head(self, workers: Sequence[WorkerProcess], within_s: float) -> Findings: ...
    # The processes, on their nodes.
    def node(self, workers: Sequence[WorkerProcess], within_s: float) -> Findings: ...
    # The errors that requests to the actors meet.
    def ray(self, workers: Sequence[WorkerProcess], within_s: float) -> Findings: ...
    # The processes that the memory guards of the nodes have ended.
    def guard(self, workers: Sequence[WorkerProcess], within_s: float) -> Findings: ...


class Judge:
    """The evidence about the processes of one group. It needs no lock, because evidence is only added.

    Without witnesses, a judge knows only what it is told.
    """

    def __init__(self, witnesses: Witnesses | None = None) -> None:
        self._witnesses = witnesses
        # The first evidence of each source that a process is gone, and the latest of each source otherwise.
        self._known: dict[WorkerProcess, dict[tuple[Source, Says], Evidence]] = {}

    def tell(self, worker: WorkerProcess, *evidence: Evidence) -> Verdict:
        """Take evidence, and return the verdict that follows, without a wait."""
        known = self._known.setdefault(worker, {})
        for one in evidence:
            before = known.setdefault((one.source, one.says), one)
            if one.says != "gone" and before.at < one.at:
                known[one.source, one.says] = one
        return decide(worker, list(known.values()))

    def ask(
        self, workers: Iterable[WorkerProcess], *, look: Look, within_s: float = 0.0
    ) -> dict[WorkerProcess, Verdict]:
        """Return the verdicts on processes, after a look at those that are not known to be lost.

        "guard" asks only the guards of memory, and "cause" the actors for what Ray knows. "all" asks the head, the
        nodes, and the actors for the causes; "known" sends no request. Each may take `within_s`.
        """
        verdicts = {worker: self.tell(worker) for worker in workers}

        def collect(witness: Witness, concerns: Callable[[Verdict], bool], limit_s: float = within_s) -> None:
            asked = [worker for worker, verdict in verdicts.items() if concerns(verdict)]
            for worker, evidence in witness(asked, limit_s).items() if asked else ():
                verdicts[worker] = self.tell(worker, *evidence)

        if (witnesses := self._witnesses) is not None:
            if look in ("head", "all"):
                collect(witnesses.head, lambda one: not one.is_lost)
            if look in ("node", "all"):
                collect(witnesses.node, lambda one: not one.is_lost)
            if look == "cause":
                collect(witnesses.ray, lambda one: not one.names("ray-error"))
            if look == "all":
                collect(witnesses.ray, lambda one: one.names("actor-state") and not one.names("ray-error"))
                # What only the node has noticed, Ray may notice soon.
                soon_s = min(within_s, NOTICED_S)
                collect(witnesses.ray, lambda one: one.is_lost and not one.names("actor-state", "ray-error"), soon_s)
            if look in ("guard", "node", "all"):
                collect(witnesses.guard, lambda one: one.kind == "killed")
        return verdicts
