# SPDX-License-Identifier: Apache-2.0
"""One attempt to bring a version to the target ranks: rounds of requests, and what may go wrong in each."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from ._descriptions import compare_replicas, one_sided
from ._remote.replies import Committed, Described, Fetched, Refused
from ._report import TransferReport
from ._routes import Route, Router
from ._side import Requests, Side, States, describe_reply, first_error, is_late, is_lost
from ._tasks import CommitOptions
from .exceptions import LayoutMismatchError, Phase, RankFailure, Role, TransferError

RESTART = "Start lost workers again with `restart_failed_workers()` of their group, then send again."
MORE_TIME = (
    "See what the late ranks do with `detect_stuck_workers(1)` of their group; if they make progress, give more time."
)
FIX = "Correct what failed, then send again."
SEND = "Send the version again from the source, with `send(version, again=True)`, or send a new one."

_Value = TypeVar("_Value", Described, Fetched)


class _Repeat(Exception):
    """The transfer has to begin again: in which phase and why, by source rank; `lost` ones take no part any more."""

    def __init__(self, phase: Phase, reasons: Mapping[int, str], *, lost: bool) -> None:
        super().__init__(phase, reasons, lost)
        self.phase: Phase = phase
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
    _compares: bool = False
    route: Route | None = None
    staged: Mapping[int, Described] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epoch = self.next_epoch()
        self._bytes_moved = 0
        self._measured: list[tuple[Phase, float, int]] = []  # the seconds of each phase on each rank

    # -- what a link does ----------------------------------------------------------------------------------------------

    def move_all(self) -> frozenset[int]:
        """Describe, stage and move, so that all target ranks have the version staged; return the ranks."""
        self._look()
        lost = self.source.lost
        with self._releasing():
            try:
                return self._move(lost, "collect").targets
            except _Repeat as repeat:
                lost, phase = lost | repeat.lost, repeat.phase
            self.epoch = self.next_epoch()
            self._look()
            try:
                return self._move(lost, phase).targets
            except _Repeat as repeat:
                text = f"The transfer has already been repeated once for such a reason. {RESTART}"
                raise self._error(repeat.phase, "source", repeat.reasons, text) from None

    def describe(self) -> Route:
        """Have all ranks describe their tensors; return the route, for people."""
        self._look()
        try:
            self._collect(self._sources(self.source.lost), range(len(self.target.members)), None)
            return self.router.kept or self.router.make(self.source.lost)
        finally:
            self.release()

    def fetch_again(self, ranks: Collection[int], last: "Attempt | None") -> bool:
        """Have some target ranks stage what the source ranks have kept of an attempt; return whether they could."""
        self._look(ranks)
        if last is None or (route := last.route) is None or not route.targets.issuperset(ranks):
            return False
        with self._releasing(ranks):
            self._collect((), ranks, None)
            self.route, self._compares = route, False
            if any(self.target.ends[rank].described != route.described[rank] for rank in ranks):
                return False
            try:
                self._fetch(replace(route, targets=frozenset(ranks)), last.staged)
            except _Repeat:
                return False
            return True

    def move_from_replicas(self, ranks: Collection[int], good: Collection[int]) -> None:
        """Have some target ranks stage what other target ranks hold."""
        self._look(ranks)
        with self._releasing(ranks):
            if self.source.method is None or not good:
                text = f"No rank holds version {self.version} any more that could be read. {SEND}"
                raise self._error("collect", "target", dict.fromkeys(ranks, "it needs the version"), text)
            self.source.look()
            self._collect(good, ranks, None)
            try:
                self.route = route = self.router.make_from_replicas(self.source, good, ranks)
            except LayoutMismatchError as error:
                text = f"No rank holds this version of some tensors any more:\n{error}\n{SEND}"
                raise self._error("collect", "target", dict.fromkeys(ranks, "it needs them"), text) from None
            self._compares = True
            try:
                self._fetch(route, self._collect(good, (), route))
            except _Repeat as repeat:
                raise self._error(repeat.phase, "target", repeat.reasons, RESTART) from None

    def commit(self, ranks: Collection[int], options: CommitOptions) -> None:
        """Have target ranks put the staged version into place: this is after the decision."""
        # From here on guards refuse calls: none comes before this on some ranks and after it on others.
        ends = self.states.decide(ranks)

        def arguments(rank: int) -> tuple[Any, ...]:
            return self.epoch, self.version, *options[1:]

        within_s = None if options.before else self._left_alone()
        first = ("prepare", self.epoch, options.first) if options.first else None
        requests = self.target.ask(ranks, "commit", arguments, alone_s=within_s, first=first)
        for member, ref in requests.items():
            ends[member.rank].unconfirmed = ref
        if self.source.name == "source":
            self.source.release(self.epoch)
        replies = self.target.wait(requests, self._left(), all_of_them=True)
        failures: dict[int, str] = {}
        for rank, reply in replies.items():
            if not is_late(reply):
                ends[rank].unconfirmed = None
            if reply.error is None:
                committed = Committed(*reply.value)
                if (reason := self.states.note(ends[rank], committed)) is not None:
                    failures[rank] = reason
                self._measured.append(("commit", committed.commit_s, rank))
            else:
                failures[rank] = describe_reply(reply)
        if failures:
            text = "The next `send`, or `sync()`, brings these ranks forward; lost workers have to be restarted first."
            raise self._error("commit", "target", failures, text) from first_error(replies)
        if self._compares and self.route is self.router.kept:
            self.router.compared = self.route

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
        assert self.route is not None
        slowest = {phase: (seconds, rank) for phase, seconds, rank in sorted(self._measured)}
        return TransferReport(
            self.version,
            self._bytes_moved,
            self.route.plan.bytes_between_nodes,
            {phase: slowest[phase][0] for phase in get_args(Phase) if phase in slowest},
            {phase: rank for phase, (_, rank) in slowest.items()},
            total_s,
            dict(Counter(self.route.tasks.transports.values())),
            self._compares,
        )

    # -- the rounds ----------------------------------------------------------------------------------------------------

    def _look(self, ranks: Collection[int] | None = None) -> None:
        """Look at both groups; refuse lost target ranks."""
        self.source.look()
        self.target.look()
        lost = {rank: why for rank, why in self.target.lost.items() if ranks is None or rank in ranks}
        if lost:
            raise self._error("collect", "target", lost, RESTART)

    def _sources(self, lost: Collection[int]) -> list[int]:
        return [member.rank for member in self.source.members if member.rank not in lost]

    def _move(self, lost: Mapping[int, str], phase: Phase) -> Route:
        """Describe, stage and move, without source ranks that were lost in a phase."""
        route, targets = None if lost else self.router.kept, range(len(self.target.members))
        staged = self._collect(self._sources(lost), targets, route)
        if route is None or self.router.kept is not route or not staged:
            try:
                route = (None if lost else self.router.kept) or self.router.make(lost)
            except LayoutMismatchError as error:
                if not lost:
                    raise
                text = f"No other source rank holds what they held:\n{error}\n{RESTART}"
                raise self._error(phase, "source", lost, text) from None
            staged = self._collect(self._sources(lost), (), route)
        self.route, self.staged = route, staged
        self._fetch(route, staged)
        return route

    def _collect(self, sources: Collection[int], targets: Collection[int], route: Route | None) -> dict[int, Described]:
        """Have ranks describe their tensors, and source ranks stage them at once if there is a route.

        The replies of the source ranks are returned if all have staged them: their tensors are still as the route has
        them.
        """
        number, ends, fresh = route.tasks.number if route else 0, self.source.ends, self.states.unconfirmed
        is_first = route is None or route is not self.router.compared
        self._compares = self.source.name == "replica" or self.check_replicas == "always"
        self._compares |= self.check_replicas == "first" and is_first

        def arguments(rank: int) -> tuple[Any, ...]:
            tasks = route.tasks.source[rank] if route and ends[rank].tasks_id != number else None
            return self.epoch, self.source.method, ends[rank].number, tasks, number, self._compares, fresh

        # No method may change the tensors while they are staged, so that a version is one state of them.
        within_s = self._left_alone() if route else None
        requests = self.source.ask(sources, "describe", arguments, alone_s=within_s)
        method, asked = self.target.method, dict[Any, Any]()
        if method is not None:
            known = self.target.ends
            asked = self.target.ask(targets, "describe", lambda rank: (self.epoch, method, known[rank].number))
        phase: Phase = "collect" if targets else "stage"
        replies = self._replies(phase, self.source, requests, Described, asked)
        self._note(self.source, replies)
        if asked:
            self._note(self.target, self._replies("collect", self.target, asked, Described))
        if route is None or any(reply.channels is None for reply in replies.values()):
            if not targets:
                why = "its tensors change meanwhile"
                raise self._error("stage", self.source.role, dict.fromkeys(sources, why), FIX)
            return {}
        for rank, reply in replies.items():
            ends[rank].tasks_id = number
            self._measured.append(("stage", reply.stage_s, rank))
        compare_replicas(self.source.role, {rank: reply.digests or {} for rank, reply in replies.items()})
        return replies

    def _note(self, side: Side, replies: Mapping[int, Described]) -> None:
        """Note descriptions; refuse tensors that cannot travel."""
        self._refuse(side, {rank: reply.refused for rank, reply in replies.items()})
        for rank, reply in replies.items():
            self._measured.append(("collect", reply.collect_s, rank))
            state = side.ends[rank]
            state.number = reply.number
            state.described = state.described if reply.tensors is None else reply.tensors

    def _refuse(self, side: Side, refused: Mapping[int, Refused]) -> None:
        """Raise if there are tensors that cannot travel."""
        wrong = [one_sided(side.role, tensor, f"rank {rank}", why) for rank in refused for tensor, why in refused[rank]]
        if wrong:
            raise LayoutMismatchError(tuple(wrong))

    def _fetch(self, route: Route, staged: Mapping[int, Described]) -> None:
        """Have target ranks fetch: first those that read over the network for their nodes, then the others."""
        nodes = self.target.nodes
        reads = route.tasks.find_reads(route.targets, nodes)
        relays = {nodes[rank]: reply.relays for rank, reply in self._fetch_by(reads, route, staged, reads, {}).items()}
        self._fetch_by(route.targets.difference(reads), route, staged, {}, relays)

    def _fetch_by(
        self,
        ranks: Collection[int],
        route: Route,
        staged: Mapping[int, Described],
        reads: Mapping[int, Any],
        relays: Mapping[str, Any],
    ) -> dict[int, Fetched]:
        """Have some ranks fetch; `relays` has by node what is read there."""
        if not ranks:
            return {}
        fresh, nodes = self.states.unconfirmed, self.target.nodes

        def arguments(rank: int) -> tuple[Any, ...]:
            mine, number = route.tasks.target[rank], route.tasks.number
            places = reads.get(rank, ())
            channels = {source: staged[source].channels for source in {*mine["sources"], *dict(places)}}
            sent = None if self.target.ends[rank].tasks_id == number else mine
            mapped = relays.get(nodes[rank], {})
            return self.epoch, self.version, sent, number, channels, places, fresh, mapped, self._left_alone()

        replies = self._replies("move", self.target, self.target.ask(sorted(ranks), "fetch", arguments), Fetched)
        self._refuse(self.target, {rank: reply.refused for rank, reply in replies.items()})
        for rank, reply in replies.items():
            if reply.outcome != "done":
                raise self._unread(rank, reply)
            self.target.ends[rank].tasks_id = route.tasks.number
            self._measured.append(("move", reply.move_s, rank))
            self._bytes_moved += reply.length
        return replies

    def _unread(self, rank: int, reply: Fetched) -> Exception:
        """Return the error of a target rank that did not get what a source rank has staged."""
        self.source.look()
        source = reply.source
        if reply.outcome == "unplanned":
            return self._error("move", "target", {rank: "it has lost the plan, as after a restart"}, "Send again.")
        if source in self.source.lost or reply.outcome == "lost":
            why = self.source.lost.get(source, f"target rank {rank} could not read from it: {reply.reason}")
            return _Repeat("move", {source: why}, lost=True)
        if reply.outcome == "overwritten":
            return _Repeat("move", {source: reply.reason}, lost=False)
        why = f"target rank {rank} waits for it: {reply.reason}"
        return self._error("move", self.source.role, {source: why}, MORE_TIME)

    # -- replies and failures ------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _left_alone(self) -> float:
        """Return how long an end may wait: it has to say what it waits for before the driver gives up on it."""
        left = self._left()
        return left - min(1.0, 0.1 * left)

    def _replies(
        self,
        phase: Phase,
        side: Side,
        requests: Requests,
        kind: type[_Value],
        others: Requests | None = None,
    ) -> dict[int, _Value]:
        """Wait for the replies of a round. `others` are cancelled if one of these fails."""
        replies = side.wait(requests, self._left())
        bad = {rank: reply for rank, reply in replies.items() if reply.error is not None}
        values = {rank: kind(*reply.value) for rank, reply in replies.items() if reply.error is None}
        superseded = [rank for rank, value in values.items() if value.outcome == "superseded"]
        if not bad and not superseded:
            return values
        side.cancel(requests, replies)
        self.target.cancel(others or {}, {})
        lost = {rank: describe_reply(reply) for rank, reply in bad.items() if is_lost(reply)}
        if lost and side.name == "source":
            raise _Repeat(phase, lost, lost=True)
        reasons = {rank: describe_reply(reply) for rank, reply in bad.items()}
        reasons.update(dict.fromkeys(superseded, "another attempt of this link has superseded this one"))
        late = any(map(is_late, bad.values()))
        remedy = RESTART if lost else MORE_TIME if late else FIX
        raise self._error(phase, side.role, reasons, remedy) from first_error(bad)

    def _error(self, phase: Phase, side: Role, reasons: Mapping[int, str], remedy: str) -> TransferError:
        nodes = (self.source if side == "source" else self.target).nodes
        failures = tuple(RankFailure(side, rank, nodes[rank], why) for rank, why in sorted(reasons.items()))
        return TransferError(phase, self.version, failures, self.states.read(), remedy)
