# SPDX-License-Identifier: Apache-2.0
"""One attempt to bring a version to the target ranks: three rounds of requests, and what may go wrong in each."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from fairlead_workergroup.spi import wait_for_turn

from ._descriptions import compare_replicas, one_sided
from ._remote.transport import explain_failure
from ._report import Costs, TransferReport
from ._routes import Route, Router, Staged
from ._side import Requests, Side, describe_reply, first_error
from ._states import States
from ._tasks import CommitOptions
from .exceptions import LayoutMismatchError, Phase, RankFailure, TransferError

RESTART = "Start lost workers again with `restart_failed_workers()` of their group, then send again."
MORE_TIME = (
    "See what the late ranks do with `detect_stuck_workers(0)` of their group; if they make progress, give more time."
)
FIX = "Fix the method that failed, then send again."
SEND = "Send the version again from the source, with `send(version, again=True)`, or send a new one."

Blamed = Literal["source", "target"]


class _Repeat(Exception):
    """The transfer has to begin again: why, by source rank, and whether these ranks take no part any more."""

    def __init__(self, reasons: Mapping[int, str], *, lost: bool) -> None:
        super().__init__(reasons, lost)
        self.reasons = dict(reasons)
        self.lost = self.reasons if lost else {}


@dataclass
class Attempt:
    """One attempt to bring a version to target ranks.

    `next_epoch` returns a larger number each time, and ends refuse the requests of earlier epochs.
    """

    source: Side
    target: Side
    router: Router
    states: States
    next_epoch: Callable[[], int]
    version: int
    deadline: float
    check_replicas: str
    in_order: bool
    _compares: bool = False
    _route: Route | None = None
    _replies: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epoch = self.next_epoch()
        self._costs = Costs()

    # -- what a link does ----------------------------------------------------------------------------------------------

    def move_all(self) -> frozenset[int]:
        """Describe, stage and move, so that all target ranks have the version staged; return the ranks."""
        self._look()
        lost = self.source.lost
        with self._releasing():
            try:
                return self._move(lost).targets
            except _Repeat as repeat:
                lost |= repeat.lost
            self.epoch = self.next_epoch()
            self._look()
            try:
                return self._move(lost).targets
            except _Repeat as repeat:
                text = f"The transfer has already been repeated once for such a reason. {RESTART}"
                raise self._error("stage", "source", repeat.reasons, text) from None

    def describe(self) -> Route:
        """Have all ranks describe their tensors; return the route, for people."""
        self._look()
        try:
            self._describe(self.source.lost, stage=False)
            return self.router.kept or self.router.make(self.source.lost)
        finally:
            self.release()

    def fetch_again(self, staged: Staged | None, ranks: Collection[int]) -> bool:
        """Have some target ranks stage what the source ranks have kept; return whether that was possible."""
        self._look(ranks)
        if staged is None or staged.version != self.version or not staged.is_kept(self.source, ranks):
            return False
        with self._releasing(ranks):
            self._collect_targets(ranks)
            if any(self.target.ends[rank].described != staged.described.get(rank) for rank in ranks):
                return False
            self._route, self._replies = staged.route, dict(staged.replies)
            self._compares = all("held" in reply["staged"] for reply in self._replies.values())
            try:
                replies = self._fetch(staged.route, ranks, self._replies)
            except _Repeat:
                return False
            return all("bytes" in reply for reply in replies.values())

    def move_from_replicas(self, ranks: Collection[int], good: Collection[int]) -> None:
        """Have some target ranks stage what other target ranks hold."""
        self._look(ranks)
        with self._releasing(ranks):
            if self.source.method is None or not good:
                text = f"No rank holds version {self.version} any more. {SEND}"
                raise self._error("collect", "target", dict.fromkeys(ranks, "it needs the version"), text)
            self.source.look()
            arguments = (self.epoch, self.source.method, 0, None, 0, False, False)
            requests = self.source.ask(good, "source", lambda rank: arguments)
            self._costs.rounds += 1
            for rank, value in self._values("collect", self.source, requests).items():
                self.source.note_description(rank, value)
            self._collect_targets(ranks, counts=False)
            try:
                self._route = self.router.make_from_replicas(self.source, good, ranks)
            except LayoutMismatchError as error:
                text = f"No rank holds this version of some tensors any more:\n{error}\n{SEND}"
                raise self._error("collect", "target", dict.fromkeys(ranks, "it needs them"), text) from None
            self._compares = True
            try:
                self._stage_and_fetch(self._route)
            except _Repeat as repeat:
                raise self._error("move", "target", repeat.reasons, RESTART) from None

    def commit(self, ranks: Collection[int], options: CommitOptions) -> None:
        """Have target ranks put the staged version into place: this is after the decision."""
        # From here on guards refuse calls; with `in_order` none comes before this on some ranks and after on others.
        ends = self.states.decide(ranks)
        if self.in_order and not wait_for_turn(self.target.group, self._left()):
            raise self._error("commit", "target", dict.fromkeys(ranks, "its group changes its members"), MORE_TIME)

        def arguments(rank: int) -> tuple[Any, ...]:
            return self.epoch, self.version, *options.as_arguments()

        within_s = None if options.pauses else self._left_alone()
        first = ("prepare", self.epoch, options.before) if options.prepares else None
        requests = self.target.ask(ranks, "commit", arguments, alone_within_s=within_s, first=first)
        self._costs.rounds += 1
        for rank, (_, ref) in requests.items():
            ends[rank].unconfirmed = ref
        if self.source.name == "source":
            self.source.release(self.epoch)
        replies = self.target.wait(requests, self._left(), all_of_them=True)
        failures: dict[int, str] = {}
        for rank, reply in replies.items():
            if not reply.late:
                ends[rank].unconfirmed = None
            if reply.is_good:
                if (reason := self.states.note(rank, ends[rank], reply.value)) is not None:
                    failures[rank] = reason
                self._costs.note(rank, reply.value, "commit")
            else:
                failures[rank] = describe_reply(reply)
        if failures:
            text = "The next `send`, or `sync()`, brings these ranks forward; lost workers have to be restarted first."
            raise self._error("commit", "target", failures, text) from first_error(replies)
        if self._compares and self._route is not None:
            self.router.note_compared(self._route)

    def staged(self) -> Staged | None:
        """Return what the source ranks keep."""
        route = self._route
        if route is None:
            return None
        described = {rank: self.target.ends[rank].described for rank in route.targets}
        return Staged(self.version, route, dict(self._replies), dict(self.source.ends), described)

    def release(self, ranks: Collection[int] | None = None) -> None:
        """Have the ends drop the tensors of this attempt; of the target all, or those of some ranks."""
        self.source.release(self.epoch)
        self.target.release(self.epoch, ranks)

    @contextlib.contextmanager
    def _releasing(self, ranks: Collection[int] | None = None) -> Iterator[None]:
        """Release if the block fails."""
        try:
            yield
        except BaseException:
            self.release(ranks)
            raise

    def report(self, total_s: float) -> TransferReport:
        """Return what the attempt has done."""
        assert self._route is not None
        return self._costs.report(self.version, self._route.plan, self._route.tasks, total_s, compared=self._compares)

    # -- the rounds ----------------------------------------------------------------------------------------------------

    def _look(self, ranks: Collection[int] | None = None) -> None:
        """Look at both groups; refuse lost target ranks."""
        self.source.look()
        self.target.look()
        lost = {rank: why for rank, why in self.target.lost.items() if ranks is None or rank in ranks}
        if lost:
            raise self._error("collect", "target", lost, RESTART)

    def _move(self, lost: Mapping[int, str]) -> Route:
        self._replies = {}
        self._describe(lost, stage=True)
        try:
            self._route = route = (None if lost else self.router.kept) or self.router.make(lost)
        except LayoutMismatchError as error:
            if not lost:
                raise
            text = f"No other source rank holds what they held:\n{error}\n{RESTART}"
            raise self._error("collect", "source", lost, text) from None
        if self._replies:
            compare_replicas(self._replies)
            self._fetch(route, route.targets, self._replies)
        else:
            self._compares = self.router.needs_digests(route, self.check_replicas)
            self._stage_and_fetch(route)
        return route

    def _describe(self, lost: Collection[int], *, stage: bool) -> None:
        """Have all ranks describe their tensors; stage them at once where the last route still holds."""
        kept = self.router.kept if not lost else None
        if kept is not None and any(self.source.ends[rank].tasks_id != kept.tasks.number for rank in kept.sources):
            kept = None
        number = kept.tasks.number if kept is not None and stage else 0
        self._compares = self.router.needs_digests(kept, self.check_replicas)
        sources = [member.rank for member in self.source.members if member.rank not in lost]
        arguments = self.source.method, number, self._compares, self.states.unconfirmed
        requests = self.source.ask(
            sources,
            "source",
            lambda rank: (self.epoch, arguments[0], self.source.ends[rank].number, None, *arguments[1:]),
            alone_within_s=self._left_alone() if number else None,
        )
        targets = self._ask_targets(range(len(self.target.members)))
        self._costs.rounds += 1
        values = self._values("collect", self.source, requests, targets)
        self._note(self.source, values)
        self._note(self.target, self._values("collect", self.target, targets))
        if number and self.router.kept is kept and all("staged" in value for value in values.values()):
            self._replies = values
            for rank, value in values.items():
                self._costs.note(rank, value, "stage")

    def _ask_targets(self, ranks: Iterable[int]) -> Requests:
        method, ends = self.target.method, self.target.ends
        if method is None:
            return {}
        return self.target.ask(ranks, "target", lambda rank: (self.epoch, method, ends[rank].number))

    def _collect_targets(self, ranks: Iterable[int], *, counts: bool = True) -> None:
        self._costs.rounds += counts
        self._note(self.target, self._values("collect", self.target, self._ask_targets(ranks)))

    def _refuse(self, side: Side, values: Mapping[int, Any]) -> None:
        """Raise if there are tensors that cannot travel."""
        refused = [
            one_sided("source" if side is self.source else "target", name, f"rank {rank}", why)
            for rank, value in values.items()
            for name, why in value.get("refused", ())
            if "tensors" not in value or not self.router.selection.excludes(name)
        ]
        if refused:
            raise LayoutMismatchError(tuple(refused))

    def _note(self, side: Side, values: Mapping[int, Any]) -> None:
        """Note descriptions."""
        self._refuse(side, values)
        for rank, value in values.items():
            self._costs.note(rank, value, "collect")
            side.note_description(rank, value)

    def _stage_and_fetch(self, route: Route) -> None:
        """Have source ranks stage and target ranks fetch at once: a target waits for the replies of its sources."""
        requests = self._ask_to_stage(route)
        staged = {rank: ref for rank, (_, ref) in requests.items()}
        fetches = self._ask_to_fetch(route, route.targets, staged)
        self._costs.rounds += 1
        self._replies = self._values("stage", self.source, requests, fetches)
        for rank, value in self._replies.items():
            self._note_staged(route, rank, value)
        compare_replicas(self._replies)
        self._wait_for_fetches(route, fetches)

    def _ask_to_stage(self, route: Route) -> Requests:
        """Have source ranks stage a version."""
        tasks, ends, fresh = route.tasks, self.source.ends, self.states.unconfirmed

        def arguments(rank: int) -> tuple[Any, ...]:
            known = ends[rank].tasks_id == tasks.number
            mine = None if known else tasks.source[rank]
            return self.epoch, None, ends[rank].number, mine, tasks.number, self._compares, fresh

        # No method may change the tensors while they are staged, so that a version is one state of them.
        return self.source.ask(sorted(route.sources), "source", arguments, alone_within_s=self._left_alone())

    def _note_staged(self, route: Route, rank: int, value: Mapping[str, Any]) -> None:
        self.source.ends[rank].tasks_id = route.tasks.number
        self._costs.note(rank, value, "stage")

    def _fetch(self, route: Route, ranks: Collection[int], staged: Mapping[int, Any]) -> dict[int, Any]:
        self._costs.rounds += 1
        return self._wait_for_fetches(route, self._ask_to_fetch(route, ranks, staged))

    def _ask_to_fetch(self, route: Route, ranks: Collection[int], staged: Mapping[int, Any]) -> Requests:
        reads = route.tasks.find_reads(ranks, self.target.nodes)
        relays: dict[int, Any] = {
            reader: {"reads": sorted(places), "fresh": self.states.unconfirmed} for reader, places in reads.items()
        }

        def arguments(rank: int) -> tuple[Any, ...]:
            mine, number = route.tasks.target[rank], route.tasks.number
            sources = {*mine["sources"], *(source for source, _ in reads.get(rank, ()))}
            replies = {source: staged[source] for source in sorted(sources)}
            sent = None if self.target.ends[rank].tasks_id == number else mine
            return self.epoch, self.version, sent, number, replies, relays.get(rank), self._left_alone()

        # The ranks that read over the network for their nodes first: the others wait for their replies.
        requests = self.target.ask(sorted(reads), "fetch", arguments)
        others = sorted(set(ranks).difference(reads))
        for rank in others:
            if (reader := route.tasks.find_reader(rank, reads, self.target.nodes)) is not None:
                relays[rank] = {"reply": requests[reader][1]}
        return requests | self.target.ask(others, "fetch", arguments)

    def _wait_for_fetches(self, route: Route, fetches: Requests) -> dict[int, Any]:
        values = self._values("move", self.target, fetches)
        self._refuse(self.target, values)
        blocked = [
            (source, rank, *why) for rank, value in values.items() for source, why in value.get("blocked", {}).items()
        ]
        if blocked:
            for pair in blocked:
                self.router.block(self.source, *pair)
            raise _Repeat({pair[0]: f"it could not be read by {pair[2]}: {pair[3]}" for pair in blocked}, lost=False)
        for rank, value in values.items():
            if "bytes" not in value:
                self._fail_for_source(rank, value)
            self.target.ends[rank].tasks_id = route.tasks.number
            self._costs.note(rank, value, "move")
        return values

    def _fail_for_source(self, rank: int, value: Mapping[str, Any]) -> NoReturn:
        """Raise the error of a target rank that did not get what a source rank has staged."""
        self.source.look()
        source = next((value[key] for key in ("lost", "overwritten", "unstaged") if key in value), None)
        if source is not None and (source in self.source.lost or "lost" in value):
            why = f"target rank {rank} could not read from it: {value.get('reason', 'it was lost')}"
            raise _Repeat({source: self.source.lost.get(source, why)}, lost=True)
        if "overwritten" in value:
            raise _Repeat({value["overwritten"]: "what it had staged was overwritten before it was read"}, lost=False)
        if "waiting" in value:
            reasons = dict.fromkeys(value["waiting"], f"what it staged did not reach target rank {rank} in time")
            raise self._error("move", "source", reasons, MORE_TIME)
        blamed: tuple[Blamed, int] = ("target", rank) if source is None else ("source", source)
        raise self._error("move", blamed[0], {blamed[1]: explain_failure(value)}, "Send again.")

    # -- replies and failures ------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _left_alone(self) -> float:
        """Return how long an end may wait: it has to say what it waits for before the driver gives up on it."""
        left = self._left()
        return left - min(1.0, 0.1 * left)

    def _values(self, phase: Phase, side: Side, requests: Requests, others: Requests | None = None) -> dict[int, Any]:
        """Wait for the replies of a round; return their values. `others` are cancelled if one of these fails."""
        replies = side.wait(requests, self._left())
        bad = {rank: reply for rank, reply in replies.items() if not reply.is_good}
        superseded = [rank for rank, reply in replies.items() if reply.is_good and "superseded" in reply.value]
        if not bad and not superseded:
            return {rank: reply.value for rank, reply in replies.items()}
        side.cancel(requests, replies)
        self.target.cancel(others or {}, {})
        name: Blamed = "target" if side is self.target else "source"
        lost = {rank: describe_reply(reply) for rank, reply in bad.items() if reply.failure is not None}
        if lost and side.name == "source":
            raise _Repeat(lost, lost=True)
        reasons = {rank: describe_reply(reply) for rank, reply in bad.items()}
        reasons.update(dict.fromkeys(superseded, "another attempt of this link has superseded this one"))
        late = any(reply.late is not None for reply in bad.values())
        remedy = RESTART if lost else MORE_TIME if late else FIX
        raise self._error(phase, name, reasons, remedy) from first_error(bad)

    def _error(self, phase: Phase, side: Blamed, reasons: Mapping[int, str], remedy: str) -> TransferError:
        nodes = (self.source if side == "source" else self.target).nodes
        failures = tuple(RankFailure(side, rank, nodes[rank], why) for rank, why in sorted(reasons.items()))
        return TransferError(phase, self.version, failures, self.states.read(), remedy)
