# SPDX-License-Identifier: Apache-2.0
"""One attempt with a bound of memory: source ranks offer buckets, which target ranks read one after the other."""

from collections.abc import Mapping
from typing import Any

import ray

from fairlead_workergroup.spi import Reply

from ._attempt import MORE_TIME, Attempt, _Repeat
from ._buckets import Exchange
from ._descriptions import check_replicas
from ._remote.transport import Late, Lost
from ._routes import Route
from ._side import Requests


class BoundedAttempt(Attempt):
    """An attempt in buckets; the router has an exchange.

    A staged target copies all buckets before the decision. One in place opens the first ones before it, with which the
    sources wait, and reads in its commit.
    """

    _keeps = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._board: Any = None
        self._offers: Requests = {}

    @property
    def _exchange(self) -> Exchange:
        exchange = self._router.exchange
        assert exchange is not None
        return exchange

    def _stage_and_fetch(self, route: Route) -> None:
        orders, ends = route.orders, self._source.ends
        try:
            self._board = self._exchange.begin(self.epoch, self._left())
        except ray.exceptions.RayError as error:
            reasons = dict.fromkeys(self._live_sources(), f"the board of its buckets did not start: {error}")
            raise self._error("stage", "source", reasons, "Ray has to start one more actor, without CPUs.") from error

        def arguments(rank: int) -> tuple[Any, ...]:
            mine = None if ends[rank].order_id == orders.number else orders.source[rank]
            offer = self._board, rank, self._left_alone()
            return self.epoch, None, ends[rank].number, mine, orders.number, self._verified, False, None, offer

        # No method may change the tensors until all buckets are read, so that a version is one state of them.
        within_s = self._left_alone()
        self._offers = self._source.ask(sorted(route.sources), "source", arguments, alone_within_s=within_s)
        fetches = self._ask_to_fetch(route, route.targets, {rank: ref for rank, (_, ref) in self._offers.items()})
        self._costs.rounds += 1
        try:
            self._compare_replicas()
            self._wait_for_fetches(route, fetches)
        except BaseException as error:
            self._exchange.stop(self.epoch)
            if isinstance(error, _Repeat):  # a source that has failed says more
                self._values("stage", self._source, self._offers)
            self._target.cancel(fetches, {})
            raise
        if not self._in_place:
            self._note_offers()

    def _compare_replicas(self) -> None:
        """Wait until all source ranks have begun, and compare what several of them hold."""
        held: dict[int, Any] = {}
        for rank, request in self._offers.items():
            try:
                held[rank] = {"staged": {"held": self._exchange.read_held(self.epoch, rank, request[1], self._left())}}
            except (Late, Lost) as error:
                self._values("stage", self._source, {rank: request})
                raise self._error("stage", "source", {rank: f"it offers no buckets: {error}"}, MORE_TIME) from error
        check_replicas(held)
        self._exchange.go_on(self.epoch, held)

    def _reading(self, route: Route, staged: Mapping[int, Any], rank: int) -> tuple[Any, ...]:
        offers = staged or {source: ref for source, (_, ref) in self._offers.items()}
        return *super()._reading(route, offers, rank)[:-1], (self._board, rank, self._in_place)

    def _wait_for_commits(self, requests: Requests) -> dict[int, Reply]:
        """Wait for all target ranks; sources do not wait for one that is lost."""
        if not self._in_place:
            return super()._wait_for_commits(requests)
        replies: dict[int, Reply] = {}
        while waiting := {rank: one for rank, one in requests.items() if rank not in replies}:
            replies |= self._target.wait(waiting, self._left())
            self._exchange.leave(self.epoch, [rank for rank, reply in replies.items() if not reply.is_good])
        self._exchange.stop(self.epoch)
        if self._left():
            self._note_offers()
        return replies

    def _note_offers(self) -> None:
        """Wait for the source ranks, which have offered everything; the next send sees one that fails now."""
        assert self._route is not None
        for rank, reply in self._source.wait(self._offers, self._left(), all_of_them=True).items():
            if reply.is_good and "staged" in reply.value:
                self._replies[rank] = reply.value
                self._source.ends[rank].order_id = self._route.orders.number
                self._costs.note(rank, reply.value, "stage")
