# SPDX-License-Identifier: Apache-2.0
"""The records of all open groups by state, and the moves between states that several methods of the ledger share."""

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ._admission import room_for
from ._model import Event, LedgerConfig, Ref, Sample, State
from ._record import NEVER, Record
from ._settled import SettledOrdinals
from ._statistics import Counters
from .exceptions import JournalError

__all__ = ["Book"]

OPEN: tuple[State, ...] = ("pending", "leased", "sealed", "claimed", "trained")


class SampleJournal(Protocol):
    """The members of a journal that the records and the ledger use."""

    keep_steps: int
    kept_step: int | None

    def keep(self, snapshot: Any) -> None: ...
    def make_room(self) -> None: ...
    def put(self, record: Record, samples: Iterable[Sample]) -> None: ...
    def remove(self, ordinal: int, sibling: int) -> None: ...
    def settle(self, ordinal: int) -> None: ...
    def flush(self) -> None: ...


class Book:
    """Hold the records, move them, and collect the callbacks of a call, which run after its last change."""

    def __init__(
        self,
        config: LedgerConfig,
        on_release: Callable[[Ref, str], object] | None,
        on_event: Callable[[Event], object] | None,
    ) -> None:
        self.config = config
        self.version = 0  # the trainer's
        self.records: dict[int, Record] = {}
        self.by_state: dict[State, dict[int, Record]] = {state: {} for state in OPEN}
        self.settled = SettledOrdinals()
        self.next = 0  # the first ordinal that is unseen
        self.consumed: dict[int, int] = {}  # groups claimed for each version, from the current one on
        self.claims: dict[int, list[int]] = {}  # the ordinals of each step that is not applied
        self.last_trained: int | None = None
        self.last_applied: int | None = None  # the last step that a checkpoint covers
        self.journal: SampleJournal | None = None
        self.counters = Counters()
        self.held = 0  # pending groups that hold samples
        # Pending groups with and without samples, lowest ordinal first. An entry may be out of date.
        self._pending_held: list[int] = []
        self._pending_empty: list[int] = []
        self._on_release, self._on_event = on_release, on_event
        self._calls: deque[Callable[[], object]] = deque()
        # Releases of payloads that the journal may still list, and whether some are new since the last flush.
        self._unlisted: list[Callable[[], object]] = []
        self._flush_first = False
        self.changed = False  # in the current call
        self.subscribers: list[Callable[[], object]] = []

    # Callbacks.

    def release(self, record: Record, samples: dict[int, Sample], reason: str, *, settles: bool = False) -> None:
        """Release the references of a group's samples, and empty the dictionary. `settles` closes the group next."""
        for sample in samples.values():
            self.release_ref(sample.ref, reason)
            if self.journal is not None and sample.ref.durable and not settles:
                self.journal.remove(record.ordinal, sample.sibling)
        samples.clear()

    def release_ref(self, ref: Ref, reason: str) -> None:
        """Release one reference."""
        self.counters.released += 1
        if self._on_release is not None:
            waits = ref.durable and self.journal is not None
            self._flush_first |= waits
            (self._unlisted if waits else self._calls).append(lambda: self._on_release(ref, reason))  # type: ignore[misc]

    def flush(self) -> None:
        """Write the journal, so that it lists no payload whose release is due."""
        if self.journal is not None:
            self.journal.flush()
        self._flush_first = False
        self._calls.extend(self._unlisted)
        self._unlisted.clear()

    def run_callbacks(self) -> None:
        """Call the caller's functions. If one raises, the next call of the ledger continues after it.

        The journal is flushed before a durable payload is released, so that it never lists a payload that is gone. If
        the disk is full, these releases wait: the call itself has succeeded, and its caller needs what it returns.
        """
        if self._flush_first:
            self._flush_first = False
            # The next explicit flush raises the error again, and `seal` does when the buffer is full.
            with contextlib.suppress(JournalError):
                self.flush()
        while self._calls:
            self._calls.popleft()()
        if self.changed:
            self.changed = False
            for callback in self.subscribers:
                callback()

    # Moves.

    def open(self, prompt: Any) -> Record:
        """Add the next ordinal as a pending group."""
        self.next += 1
        return self.reopen(self.next - 1, prompt, 1)

    def reopen(self, ordinal: int, prompt: Any, attempt: int) -> Record:
        """Add a pending group that holds nothing."""
        record = Record(ordinal, prompt, attempt)
        self.records[ordinal] = self.by_state["pending"][ordinal] = record
        heapq.heappush(self._pending_empty, ordinal)
        self._report(record, "unseen", "pending", None)
        return record

    def fill(self, record: Record, samples: dict[int, Sample]) -> None:
        """Give samples of an earlier process to a pending group that holds nothing."""
        record.samples = samples
        oldest = record.find_oldest()
        if len(samples) == self.config.group_size:
            self.move(record, "sealed", "restored")
            record.oldest, record.ready_version = oldest, self.version
        else:
            record.oldest = oldest
            self._put_pending(record)

    def move(self, record: Record, state: State, reason: str | None = None) -> None:
        """Put an open group into another open state."""
        before = record.state
        del self.by_state[before][record.ordinal]
        self.by_state[state][record.ordinal] = record
        if before == "pending" and record.oldest != NEVER:
            self.held -= 1
        record.state = state
        if state == "pending":
            self._put_pending(record)
        self._report(record, before, state, reason)

    def settle(self, record: Record, state: State, reason: str | None = None, cause: str = "") -> None:
        """Close a group as applied or dropped. Its references have been released."""
        before = record.state
        del self.by_state[before][record.ordinal], self.records[record.ordinal]
        if before == "pending" and record.oldest != NEVER:
            self.held -= 1
        if state == "dropped":
            self.counters.drops[reason or ""] += 1
        self.settled.add(record.ordinal, dropped=state == "dropped")
        if self.journal is not None:
            self.journal.settle(record.ordinal)
        self._report(record, before, state, cause or reason)

    def return_to_pending(self, record: Record, reason: str) -> None:
        """Make a group pending with the siblings that it still holds."""
        record.lease, record.deadline, record.waiting = None, None, 0
        oldest = record.find_oldest()
        if record.state == "pending":
            self.held -= 1
            record.oldest = oldest
            self._put_pending(record)
            self._report(record, "pending", "pending", reason)
            return
        record.oldest = oldest
        self.move(record, "pending", reason)

    def _put_pending(self, record: Record) -> None:
        if record.oldest != NEVER:
            self.held += 1
            heapq.heappush(self._pending_held, record.ordinal)
        else:
            heapq.heappush(self._pending_empty, record.ordinal)

    def list_held(self) -> list[Record]:
        """Return the pending groups that hold samples."""
        return [one for one in self.by_state["pending"].values() if one.oldest != NEVER] if self.held else []

    def seal(self, record: Record) -> None:
        """End the lease of a group that has all the samples it will get."""
        record.lease, record.deadline = None, None
        record.oldest, record.ready_version = record.find_oldest(), self.version
        self.move(record, "sealed")

    def discard(self, record: Record, reason: str) -> None:
        """Release everything that a group holds. Finished samples count as regenerated."""
        self.counters.regenerated += len(record.samples)
        self.release(record, record.samples, reason)

    def drop(self, record: Record, reason: str, cause: str = "") -> None:
        """Release everything that a group holds, and close it as dropped; `cause` is the event's, instead of reason."""
        self.release(record, record.samples, reason)
        self.settle(record, "dropped", reason, cause)

    def train(self, record: Record) -> None:
        """Release what a trained group holds in memory only. Durable samples stay until a checkpoint covers it."""
        durable = {sibling: sample for sibling, sample in record.samples.items() if sample.ref.durable}
        for sibling in durable:
            del record.samples[sibling]
        self.release(record, record.samples, "trained")
        record.samples = durable
        self.move(record, "trained")

    def apply(self, step: int) -> None:
        """Close the groups of all steps up to one as applied."""
        for one in sorted(one for one in self.claims if one <= step):
            for ordinal in self.claims.pop(one):
                record = self.records[ordinal]
                self.counters.attempts += record.attempt
                self.release(record, record.samples, "applied", settles=True)
                self.settle(record, "applied")
        self.last_applied = step

    def take_pending(self, count: int, room: int) -> Iterator[Record]:
        """Yield up to `count` pending groups, lowest ordinal first, at most `room` without samples.

        The caller moves each before it takes the next one, because a heap may list a group twice.
        """
        for _ in range(count):
            held = self._first(self._pending_held, holds=True)
            empty = self._first(self._pending_empty, holds=False) if room > 0 else None
            if held is not None and (empty is None or held < empty):
                yield self.records[heapq.heappop(self._pending_held)]
            elif empty is not None:
                room -= 1
                yield self.records[heapq.heappop(self._pending_empty)]
            else:
                return

    def _first(self, heap: list[int], *, holds: bool) -> int | None:
        pending = self.by_state["pending"]
        while heap:
            record = pending.get(heap[0])
            if record is not None and (record.oldest != NEVER) is holds:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _report(self, record: Record, before: State, after: State, reason: str | None) -> None:
        self.changed = True
        if self._on_event is not None:
            event = Event(record.ordinal, before, after, self.version, record.step, reason)
            self._calls.append(lambda: self._on_event(event))  # type: ignore[misc]

    # Counts.

    @property
    def ahead(self) -> int:
        """The groups claimed for the current version or later ones; a version before the last counts as full."""
        last = max(self.consumed, default=self.version)
        return (last - self.version) * self.config.groups_per_version + self.consumed.get(last, 0)

    @property
    def room(self) -> int:
        """The groups that may be leased now, pending groups that hold samples included."""
        config = self.config
        limit = room_for(
            lookahead=config.gate,
            serving_lag=config.serving_lag,
            groups_per_version=config.groups_per_version,
            leased=len(self.by_state["leased"]) + self.held,
            sealed=len(self.by_state["sealed"]),
            ahead=self.ahead,
            max_leased=config.max_leased,
            max_open=config.max_open,
        )
        return limit + self.held

    def count_claimed(self, version: int, change: int) -> None:
        """Count groups that a claim takes for a version, or gives back."""
        if version >= self.version:
            self.consumed[version] = self.consumed.get(version, 0) + change
            if not self.consumed[version]:
                del self.consumed[version]
