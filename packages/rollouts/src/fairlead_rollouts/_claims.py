# SPDX-License-Identifier: Apache-2.0
"""The claims of steps: the sealed groups that a step may train, and those that have become too old."""

from ._admission import find_blockers
from ._book import Book
from ._model import Claim, Shortage, State
from ._policies import View
from ._record import Record

__all__ = ["Claims"]


class Claims:
    """Choose the groups of a step, and give them back."""

    def __init__(self, book: Book) -> None:
        self._book, self._config = book, book.config

    def next_place(self) -> tuple[int, int]:
        """Return the version that trains the next claim, and the places left in it."""
        size = self._config.groups_per_version
        later, used = divmod(self._book.ahead, size)
        return self._book.version + later, size - used

    def claim(self, step: int, count: int, least: int, *, exhausted: bool) -> Claim | Shortage:
        """Take between `least` and `count` groups, if the policy and the bound allow it."""
        at, left = self.next_place()
        self.sweep(at)
        book, config = self._book, self._config
        open_records = [*book.by_state["sealed"].values(), *book.by_state["leased"].values(), *book.list_held()]
        view = View(at, config.max_staleness, tuple([record.as_open() for record in open_records]))
        chosen = config.policy.select(view, count)
        have = len(chosen)
        if have < least:
            ends = exhausted and len(book.by_state["pending"]) + len(open_records) - book.held < least
            return Shortage("exhausted" if ends else "not_enough", have, least)
        if config.on_stale != "wait":
            return self._take(step, at, chosen)
        blocked_by: tuple[int, ...] = ()
        # Fewer groups are never harder to take, because each of them takes a place.
        for size in range(have, least - 1, -1):
            blocked_by = find_blockers(view, chosen[:size], left - size, config.groups_per_version)
            if not blocked_by:
                return self._take(step, at, chosen[:size])
        book.counters.waits += 1
        book.counters.blocked_by = blocked_by
        return Shortage("wait", have, least, blocked_by)

    def _take(self, step: int, at: int, ordinals: tuple[int, ...]) -> Claim:
        book, counters = self._book, self._book.counters
        records = [book.records[ordinal] for ordinal in ordinals]
        for record in records:
            record.step, record.version = step, at
            book.move(record, "claimed")
            counters.staleness[at - record.oldest] += 1
            counters.versions_in_flight += record.ready_version - record.oldest
            counters.versions_in_queue += at - record.ready_version
        book.count_claimed(at, len(records))
        book.claims.setdefault(step, []).extend(ordinals)
        return Claim(step, at, tuple([record.as_group() for record in records]))

    def give_back(self, record: Record, state: State | None = "sealed") -> None:
        """Remove a group from its claim."""
        self._book.count_claimed(record.version, -1)
        record.step = None
        if state is not None:
            self._book.move(record, state, "unclaimed")

    def sweep(self, at: int) -> int:
        """Requeue or drop groups that are too old for version `at`."""
        bound, book = self._config.max_staleness, self._book
        limit = -1 if bound is None else at - bound
        stale = [one for one in [*book.by_state["sealed"].values(), *book.list_held()] if one.oldest < limit]
        for record in stale:
            if self._config.on_stale == "drop":
                book.drop(record, "stale")
                continue
            book.counters.requeued[record.attempt] += 1
            book.discard(record, "stale")
            book.return_to_pending(record, "stale")
        return len(stale)
