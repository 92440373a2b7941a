# SPDX-License-Identifier: Apache-2.0
"""One attempt with a bound of memory: source ranks offer buckets, which target ranks read one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from fairlead_workergroup.spi import Reply

from ._attempt import MORE_TIME, Attempt, _Repeat
from ._descriptions import check_replicas
from ._remote.buckets import DRIVER, HELD, take_bucket
from ._remote.transport import Late, Lost
from ._routes import Route, Staged
from ._side import Requests


@dataclass
class BoundedAttempt(Attempt):
    """An attempt in buckets; the router has an exchange.

    A staged target copies all buckets before the decision. One in place opens the first ones before it, with which the
    sources wait, and reads in its commit.
    """

    _board: Any = None
    _offers: Requests = field(default_factory=dict)

    def _stage_and_fetch(self, route: Route) -> None:
        assert self.router.exchange is not None
        try:
            self._board = self.router.exchange.begin(self.epoch, self._left())
        except ray.exceptions.RayError as error:
            reasons = dict.fromkeys(self.source.live, f"the board of its buckets did not start: {error}")
            raise self._error("stage", "source", reasons, "Ray has to start one more actor, without CPUs.") from error

        self._offers = self._ask_to_stage(route, self._board)
        fetches = self._ask_to_fetch(route, route.targets, {rank: ref for rank, (_, ref) in self._offers.items()})
        self._costs.rounds += 1
        try:
            self._compare_replicas()
            self._wait_for_fetches(route, fetches)
        except BaseException as error:
            self._board.stop.remote(self.epoch)
            if isinstance(error, _Repeat):  # a source that has failed says more
                self._values("stage", self.source, self._offers)
            self.target.cancel(fetches, {})
            raise
        if not self.in_place:
            self._note_offers()

    def _compare_replicas(self) -> None:
        """Wait until all source ranks have begun, and compare what several of them hold."""
        held: dict[int, Any] = {}
        for rank, request in self._offers.items():
            try:
                found = take_bucket(self._board, self.epoch, rank, HELD, request[1].future(), self.deadline)
                held[rank] = {"staged": {"held": found}}
            except (Late, Lost) as error:
                self._values("stage", self.source, {rank: request})
                raise self._error("stage", "source", {rank: f"it offers no buckets: {error}"}, MORE_TIME) from error
        check_replicas(held)
        self._board.finish.remote(self.epoch, DRIVER, [(rank, HELD) for rank in held])

    def staged(self) -> Staged | None:
        """Return None: buckets are not kept."""
        return None

    def _reading(self, route: Route, staged: Mapping[int, Any], rank: int) -> tuple[Any, ...]:
        offers = staged or {source: ref for source, (_, ref) in self._offers.items()}
        return *super()._reading(route, offers, rank)[:-1], (self._board, rank, self.in_place)

    def _wait_for_commits(self, requests: Requests) -> dict[int, Reply]:
        """Wait for all target ranks; sources do not wait for one that is lost."""
        if not self.in_place:
            return super()._wait_for_commits(requests)
        replies: dict[int, Reply] = {}
        while waiting := {rank: one for rank, one in requests.items() if rank not in replies}:
            replies |= self.target.wait(waiting, self._left())
            for rank in [rank for rank, reply in replies.items() if not reply.is_good]:
                self._board.leave.remote(self.epoch, rank)
        self._board.stop.remote(self.epoch)
        if self._left():
            self._note_offers()
        return replies

    def _note_offers(self) -> None:
        """Wait for the source ranks, which have offered everything; the next send sees one that fails now."""
        assert self._route is not None
        for rank, reply in self.source.wait(self._offers, self._left(), all_of_them=True).items():
            if reply.is_good and "staged" in reply.value:
                self._replies[rank] = reply.value
                self._note_staged(self._route, rank, reply.value)
