# SPDX-License-Identifier: Apache-2.0
"""The records of all open groups by state, and the moves between states that several methods of the ledger share."""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from ._admission import room_for
from ._model import Event, LedgerConfig, Ref, Sample, State
from ._record import NEVER, Record
from ._settled import SettledOrdinals
from ._statistics import Counters

__all__ = ["Book"]

OPEN: tuple[State, ...] = ("pending", "leased", "sealed", "claimed", "trained")


class Book:
    """Hold the records, move them, and collect the callbacks of a call, which run after its last change.

    Attributes:
        config: the rules.
        version: the trainer's version.
        records: every open group by ordinal.
        by_state: the same groups, by state.
        settled: every group that is applied or dropped.
        next: the first ordinal that is unseen.
        consumed: the groups claimed for each version, from the current one on.
        claims: the ordinals of each step that is claimed and not applied, in order.
        last_trained: the last step that has been trained.
        counters: what has happened.
        held: the number of pending groups that hold samples.
    """

    def __init__(
        self,
        config: LedgerConfig,
        on_release: Callable[[Ref, str], object] | None,
        on_event: Callable[[Event], object] | None,
    ) -> None:
        self.config = config
        self.version = 0
        self.records: dict[int, Record] = {}
        self.by_state: dict[State, dict[int, Record]] = {state: {} for state in OPEN}
        self.settled = SettledOrdinals()
        self.next = 0
        self.consumed: dict[int, int] = {}
        self.claims: dict[int, list[int]] = {}
        self.last_trained: int | None = None
        self.counters = Counters()
        self.held = 0
        # Pending groups with and without samples, lowest ordinal first. An entry may be out of date.
        self._pending_held: list[int] = []
        self._pending_empty: list[int] = []
        self._targets: dict[int, int] = {}
        self._on_release, self._on_event = on_release, on_event
        self._calls: deque[Callable[[], object]] = deque()

    # Callbacks.

    def release(self, samples: dict[int, Sample], reason: str) -> None:
        """Release the references of samples, and empty the dictionary."""
        for sample in samples.values():
            self.release_ref(sample.ref, reason)
        samples.clear()

    def release_ref(self, ref: Ref, reason: str) -> None:
        """Release one reference."""
        self.counters.released += 1
        if self._on_release is not None:
            self._calls.append(lambda: self._on_release(ref, reason))  # type: ignore[misc]

    def run_callbacks(self) -> None:
        """Call the caller's functions. If one raises, the next call of the ledger continues after it."""
        while self._calls:
            self._calls.popleft()()

    # Moves.

    def open(self, prompt: Any) -> Record:
        """Add the next ordinal as a pending group."""
        record = Record(self.next, prompt)
        self.next += 1
        self.records[record.ordinal] = self.by_state["pending"][record.ordinal] = record
        heapq.heappush(self._pending_empty, record.ordinal)
        self._report(record, "unseen", "pending", None)
        return record

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

    def settle(self, record: Record, state: State, reason: str | None = None) -> None:
        """Close a group as applied or dropped. Its references have been released."""
        before = record.state
        del self.by_state[before][record.ordinal], self.records[record.ordinal]
        if before == "pending" and record.oldest != NEVER:
            self.held -= 1
        if state == "dropped":
            self.counters.drops[reason or ""] += 1
        self.settled.add(record.ordinal, dropped=state == "dropped")
        self._report(record, before, state, reason)

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
            self.unassign(record)
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
        self.release(record.samples, reason)
        self.release(record.carry, reason)

    def drop(self, record: Record, reason: str) -> None:
        """Release everything that a group holds, and close it as dropped."""
        self.release(record.samples, reason)
        self.release(record.carry, reason)
        self.unassign(record)
        self.settle(record, "dropped", reason)

    def apply(self, record: Record) -> None:
        """Release the samples of a trained group, and close it as applied."""
        self.counters.attempts += record.attempt
        self.release(record.samples, "trained")
        self.settle(record, "applied")

    def take_pending(self, count: int, room: int) -> list[Record]:
        """Remove and return up to `count` pending groups, lowest ordinal first, at most `room` without samples."""
        taken: list[Record] = []
        while len(taken) < count:
            held = self._first(self._pending_held, holds=True)
            empty = self._first(self._pending_empty, holds=False) if room > 0 else None
            if held is not None and (empty is None or held < empty):
                heapq.heappop(self._pending_held)
                taken.append(self.records[held])
            elif empty is not None:
                heapq.heappop(self._pending_empty)
                room -= 1
                taken.append(self.records[empty])
            else:
                break
        return taken

    def _first(self, heap: list[int], *, holds: bool) -> int | None:
        pending = self.by_state["pending"]
        while heap:
            record = pending.get(heap[0])
            if record is not None and (record.oldest != NEVER) is holds:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _report(self, record: Record, before: State, after: State, reason: str | None) -> None:
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

    # Target steps, for the policy that assigns them.

    def assign(self, record: Record) -> None:
        """Assign the first step that has a place left, if the policy wants it."""
        size = getattr(self.config.policy, "groups_per_step", None)
        if size is None or record.target_step is not None:
            return
        step = getattr(self.config.policy, "first_step", 1) if self.last_trained is None else self.last_trained + 1
        while self._targets.get(step, 0) >= size:
            step += 1
        self._targets[step] = self._targets.get(step, 0) + 1
        record.target_step = step

    def unassign(self, record: Record) -> None:
        """Free the place of a group in its target step."""
        if record.target_step is not None and record.target_step in self._targets:
            self._targets[record.target_step] -= 1
        record.target_step = None

    def forget_targets(self, step: int) -> None:
        """Forget the steps up to one that has been trained."""
        self._targets = {one: count for one, count in self._targets.items() if one > step}
