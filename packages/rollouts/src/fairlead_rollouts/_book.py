# SPDX-License-Identifier: Apache-2.0
"""The records of all open groups by state, and the moves between states that several methods of the ledger share."""

from typing import Any

from ._admission import room_for
from ._callbacks import Callbacks
from ._model import Event, LedgerConfig, Sample, State
from ._record import NEVER, Record, StepClaim
from ._settled import SettledPrompts
from ._statistics import Counters

__all__ = ["OPEN", "Book"]

OPEN: tuple[State, ...] = ("pending", "leased", "finished", "claimed", "trained")


class Book:
    """Hold the records and move them."""

    def __init__(self, config: LedgerConfig, callbacks: Callbacks) -> None:
        self.config, self.callbacks = config, callbacks
        self.version = 0  # the trainer's
        self.records: dict[int, Record] = {}
        self.by_state: dict[State, dict[int, Record]] = {state: {} for state in OPEN}
        self.settled = SettledPrompts()
        self.next = 0  # the first prompt that is unseen
        self.steps: dict[int, StepClaim] = {}  # of the steps that a checkpoint does not cover yet
        self.consumed: dict[int, int] = {}  # the places that steps take of each version, from the current one on
        # What was dropped since the last checkpoint: the attempt, the prompt, and the last step that was prepared then.
        self.drops: dict[int, tuple[int, Any, int]] = {}
        self.last_trained: int | None = None
        self.last_applied: int | None = None  # the last step that a checkpoint covers
        self.prepared: dict[int, int] = {}  # the version of each step whose checkpoint is being written
        self.counters = Counters()
        self.held = 0  # pending groups that hold samples

    # Moves.

    def open(self, prompt: Any) -> Record:
        """Add the next prompt as a pending group."""
        self.next += 1
        return self.reopen(self.next - 1, prompt, 1)

    def reopen(self, prompt_id: int, prompt: Any, attempt: int) -> Record:
        """Add a pending group that holds nothing."""
        record = Record(prompt_id, prompt, attempt)
        self.records[prompt_id] = self.by_state["pending"][prompt_id] = record
        self._report(record, "unseen", "pending", None)
        return record

    def fill(self, record: Record, samples: dict[int, Sample]) -> None:
        """Give samples of an earlier process to a pending group that holds nothing."""
        record.samples = samples
        if len(samples) == self.config.group_size:
            self.move(record, "finished", "restored")
        self.held += record.state == "pending"
        record.oldest = record.find_oldest()

    def move(self, record: Record, state: State, reason: str | None = None) -> None:
        """Put an open group into another open state."""
        before = record.state
        del self.by_state[before][record.prompt_id]
        self.by_state[state][record.prompt_id] = record
        if before == "pending" and record.oldest != NEVER:
            self.held -= 1
        record.state = state
        if state == "pending":
            record.oldest = record.find_oldest()
            self.held += record.oldest != NEVER
        self._report(record, before, state, reason)

    def settle(self, record: Record, state: State, reason: str | None = None) -> None:
        """Close a group as applied or dropped. Its references have been released."""
        before = record.state
        del self.by_state[before][record.prompt_id], self.records[record.prompt_id]
        if before == "pending" and record.oldest != NEVER:
            self.held -= 1
        self.settled.add(record.prompt_id, dropped=state == "dropped")
        self._report(record, before, state, reason)

    def return_to_pending(self, record: Record, reason: str) -> None:
        """Make a group pending with the samples that it still holds."""
        record.lease, record.deadline, record.waiting = None, None, 0
        self.move(record, "pending", reason)

    def list_held(self) -> list[Record]:
        """Return the pending groups that hold samples."""
        pending = self.by_state["pending"].values()
        return [record for record in pending if record.oldest != NEVER] if self.held else []

    def finish(self, record: Record) -> None:
        """End the lease of a group that has all the samples it will get."""
        record.lease, record.deadline = None, None
        record.oldest = record.find_oldest()
        self.move(record, "finished")

    def release(self, record: Record, reason: str) -> None:
        """Release everything that a group holds."""
        for sample in record.samples.values():
            self.callbacks.release(sample.ref, reason)
        record.samples.clear()

    def discard(self, record: Record, reason: str) -> None:
        """Release everything that a group holds, which has to be generated again."""
        self.counters.regenerated += len(record.samples)
        self.release(record, reason)

    def drop(self, record: Record, reason: str, cause: str = "") -> None:
        """Release everything that a group holds, and close it as dropped; `cause` is the event's, instead of reason."""
        self.release(record, reason)
        self.counters.drops[reason] += 1
        last_prepared = max(self.prepared, default=-1 if self.last_applied is None else self.last_applied)
        self.drops[record.prompt_id] = record.attempt, record.prompt, last_prepared
        self.settle(record, "dropped", cause or reason)

    def train(self, step: int) -> None:
        """Count the claims up to a step as trained. Durable samples stay until a checkpoint covers them."""
        for number in sorted(number for number in self.steps if number <= step):
            self.steps[number].unfilled = 0
            for record in map(self.records.__getitem__, self.steps[number].prompt_ids):
                if record.state != "claimed":
                    continue
                for sample in list(record.samples.values()):
                    if not sample.ref.durable:
                        self.callbacks.release(record.samples.pop(sample.index).ref, "trained")
                self.move(record, "trained")
        self.last_trained = step if self.last_trained is None else max(step, self.last_trained)

    def prepare(self, step: int) -> None:
        """Note that a checkpoint of a step has been written: drops until now belong to it."""
        self.prepared[step] = self.version
        self.drops = {
            prompt_id: (attempt, prompt, min(last, step - 1))
            for prompt_id, (attempt, prompt, last) in self.drops.items()
        }

    def apply(self, step: int) -> None:
        """Close the groups of all steps up to one as applied."""
        version = self.prepared.get(step, self.version)
        for number in sorted(number for number in self.steps if number <= step):
            claim = self.steps[number]
            for prompt_id in claim.prompt_ids:
                record = self.records[prompt_id]
                self.release(record, "applied")
                self.settle(record, "applied")
            claim.prompt_ids = []
            if claim.version < version:  # otherwise a resume from this step counts its places
                del self.steps[number]
        self.drops = {prompt_id: drop for prompt_id, drop in self.drops.items() if drop[2] >= step}
        self.prepared = {number: version for number, version in self.prepared.items() if number > step}
        self.last_applied = step

    def choose_pending(self, count: int, room: int) -> list[Record]:
        """Return up to `count` pending groups, lowest prompt id first, at most `room` without samples."""
        chosen: list[Record] = []
        for _, record in sorted(self.by_state["pending"].items()):
            if len(chosen) == count:
                break
            if record.oldest != NEVER or room > 0:
                room -= record.oldest == NEVER
                chosen.append(record)
        return chosen

    def _report(self, record: Record, before: State, after: State, reason: str | None) -> None:
        self.callbacks.changed = True
        if self.callbacks.on_event is not None:
            self.callbacks.report(Event(record.prompt_id, before, after, self.version, record.step, reason))

    # Counts.

    @property
    def ahead(self) -> int:
        """The places taken of the current version or later ones; a version before the last counts as full."""
        last = max(self.consumed, default=self.version)
        return (last - self.version) * self.config.groups_per_version + self.consumed.get(last, 0)

    @property
    def next_place(self) -> tuple[int, int]:
        """The version that trains the next claim, and the places left in it."""
        size = self.config.groups_per_version
        later, used = divmod(self.ahead, size)
        return self.version + later, size - used

    @property
    def room(self) -> int:
        """The groups that may be leased now, pending groups that hold samples included."""
        config = self.config
        limit = room_for(
            lookahead=config.gate,
            serving_lag=config.serving_lag,
            groups_per_version=config.groups_per_version,
            leased=len(self.by_state["leased"]) + self.held,
            finished=len(self.by_state["finished"]),
            ahead=self.ahead - sum([claim.unfilled for claim in self.steps.values()]),
            max_leased=config.max_leased,
            max_open=config.max_open,
        )
        return limit + self.held

    def consume(self, version: int, places: int) -> None:
        """Count places that a step takes of a version, or gives back."""
        if version >= self.version:
            self.consumed[version] = self.consumed.get(version, 0) + places
            if not self.consumed[version]:
                del self.consumed[version]
