# SPDX-License-Identifier: Apache-2.0
"""The records of all open groups by state, and the moves between states that several methods of the ledger share."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ._callbacks import Callbacks
from ._model import Group, Lease, LedgerConfig, Ref, Sample, State
from ._snapshot import Snapshot

__all__ = ["APPLIED", "DROPPED", "NEVER", "OPEN", "Book", "Record", "StepClaim"]

OPEN: tuple[State, ...] = ("pending", "leased", "finished", "claimed", "trained")
APPLIED, DROPPED = 1, 2  # in `Book.fates`
# The oldest version of a group that holds nothing: newer than every version.
NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class Record:
    """The record of one open group."""

    prompt_id: int
    prompt: Any
    attempt: int
    state: State = "pending"
    samples: dict[int, Sample] = field(default_factory=dict)  # the finished ones
    lease: Lease | None = None
    waiting: int = 0  # a bit for each sample that the lease owes
    deadline: float | None = None  # of the lease
    failed: bool = False  # whether a sample of the lease has failed
    failure: str = ""  # why a sample has failed last
    oldest: int = NEVER  # the oldest version of anything that the group holds
    step: int | None = None  # the step that has claimed it
    version: int = 0  # the version that trains this step

    def find_oldest(self) -> int:
        """Return the oldest version of the finished samples, or `NEVER`."""
        return min([sample.oldest_version for sample in self.samples.values()], default=NEVER)

    def as_group(self) -> Group:
        """Return the finished group as a value."""
        samples = tuple([sample for _, sample in sorted(self.samples.items())])
        newest = max([sample.newest_version for sample in samples])
        return Group(self.prompt_id, samples, self.oldest, newest, self.attempt)


@dataclass(slots=True, eq=False)
class StepClaim:
    """The claim of one step that has not been applied."""

    version: int  # the version that it updates
    places: int  # of the groups of this version; a step that takes fewer groups than requested uses up all of them
    prompt_ids: list[int] = field(default_factory=list)
    unfilled: int = 0  # the places of groups that were dropped from the claim, which the step may claim again


@dataclass
class Counters:
    """The part of `Statistics` that is counted as it happens."""

    drops: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    requeued: Counter[int] = field(default_factory=Counter)
    regenerated: int = 0
    fenced: int = 0
    waits: int = 0
    blocked_by: tuple[int, ...] = ()


class Book:
    """Hold the records and move them."""

    def __init__(self, config: LedgerConfig, callbacks: Callbacks) -> None:
        self.config, self.callbacks = config, callbacks
        self.version = 0  # the trainer's
        self.records: dict[int, Record] = {}
        self.by_state: dict[State, dict[int, Record]] = {state: {} for state in OPEN}
        self.fates = bytearray()  # of each prompt that has been seen: 0 while it is open, then APPLIED or DROPPED
        self.steps: dict[int, StepClaim] = {}  # of the steps that a checkpoint does not cover yet
        # What was dropped since the last checkpoint: the attempt, the prompt, and the last step that was prepared then.
        self.drops: dict[int, tuple[int, Any, int]] = {}
        self.last_trained: int | None = None
        self.last_applied: int | None = None  # the last step that a checkpoint covers
        self.prepared: dict[int, int] = {}  # the version of each step whose checkpoint is being written
        self.source_ended = False
        self.counters = Counters()

    # Moves.

    def open(self, prompt: Any) -> Record:
        """Add the next prompt as a pending group."""
        self.fates.append(0)
        return self._reopen(len(self.fates) - 1, prompt, 1)

    def _reopen(self, prompt_id: int, prompt: Any, attempt: int) -> Record:
        record = Record(prompt_id, prompt, attempt)
        self.records[prompt_id] = self.by_state["pending"][prompt_id] = record
        self.callbacks.changed = True
        return record

    def move(self, record: Record, state: State) -> None:
        """Put an open group into another open state."""
        del self.by_state[record.state][record.prompt_id]
        self.by_state[state][record.prompt_id] = record
        record.state = state
        self.callbacks.changed = True

    def end_lease(self, record: Record, state: State) -> None:
        """Make a group pending or finished, with the samples that it holds."""
        record.lease, record.deadline, record.waiting = None, None, 0
        record.oldest = record.find_oldest()
        self.move(record, state)

    def _settle(self, record: Record, fate: int) -> None:
        """Close a group whose references have been released."""
        del self.by_state[record.state][record.prompt_id], self.records[record.prompt_id]
        self.fates[record.prompt_id] = fate
        self.callbacks.changed = True

    def release(self, record: Record, reason: str) -> None:
        """Release everything that a group holds."""
        for sample in record.samples.values():
            self.callbacks.release(sample.ref, reason)
        record.samples.clear()

    def discard(self, record: Record, reason: str) -> None:
        """Release everything that a group holds, which has to be generated again."""
        self.counters.regenerated += len(record.samples)
        self.release(record, reason)

    def drop(self, record: Record, reason: str) -> None:
        """Release everything that a group holds, and close it as dropped."""
        self.release(record, reason)
        self.counters.drops[reason] += 1
        last_prepared = max(self.prepared, default=-1 if self.last_applied is None else self.last_applied)
        self.drops[record.prompt_id] = record.attempt, record.prompt, last_prepared
        self._settle(record, DROPPED)

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
                self._settle(record, APPLIED)
            claim.prompt_ids = []
            if claim.version < version:  # otherwise a resume from this step counts its places
                del self.steps[number]
        self.drops = {prompt_id: drop for prompt_id, drop in self.drops.items() if drop[2] >= step}
        self.prepared = {number: version for number, version in self.prepared.items() if number > step}
        self.last_applied = step

    # Counts.

    def list_held(self) -> list[Record]:
        """Return the pending groups that hold samples."""
        return [record for record in self.by_state["pending"].values() if record.samples]

    def count_places(self, version: int) -> int:
        """Return how many groups of a version are taken by steps."""
        return sum([claim.places for claim in self.steps.values() if claim.version == version])

    @property
    def ahead(self) -> int:
        """The places taken of the current version or later ones; a version before the last counts as full."""
        last = max([claim.version for claim in self.steps.values()], default=-1)
        if last < self.version:
            return 0
        return (last - self.version) * self.config.groups_per_version + self.count_places(last)

    @property
    def next_place(self) -> tuple[int, int]:
        """The version that trains the next claim, and the places left in it."""
        size = self.config.groups_per_version
        later, used = divmod(self.ahead, size)
        return self.version + later, size - used

    @property
    def room(self) -> int:
        """The groups without samples that may be leased now, counted from live records only.

        With a lookahead that equals the bound K, a group that is leased now and trained oldest first is trained at most
        K versions after its weights.
        """
        config, limits = self.config, [sys.maxsize]
        leased = len(self.by_state["leased"]) + len(self.list_held())
        untrained = leased + len(self.by_state["finished"])
        if config.max_leased is not None:
            limits.append(config.max_leased - leased)
        if config.max_open is not None:
            limits.append(config.max_open - untrained)
        if config.gate is not None:
            claimed = self.ahead - sum([claim.unfilled for claim in self.steps.values()])
            places = (config.gate + 1 - config.serving_lag) * config.groups_per_version
            limits.append(places - untrained - claimed)
        return max(0, min(limits))

    # Snapshots.

    def take_snapshot(self, runs: list[int], step: int | None, source: bytes) -> Snapshot:
        """Return a copy of the state, of the checkpoint of a step or of now. The caller holds the ledger's lock."""
        last_steps = [number for number in (*self.steps, self.last_trained) if number is not None]
        return Snapshot(
            runs=runs,
            step=step,
            version=self.version,
            group_size=self.config.group_size,
            last_applied=self.last_applied,
            last_step=max(last_steps, default=None),
            steps=[(number, claim.version, claim.places) for number, claim in self.steps.items()],
            drops=[(prompt_id, *drop) for prompt_id, drop in self.drops.items()],
            source=source,
            fates=bytes(self.fates),
            groups=[
                (record.prompt_id, record.attempt, record.prompt, record.step, tuple(record.samples.values()))
                for record in self.records.values()
            ],
        )

    def restore(self, saved: Snapshot, *, step: int, version: int, exists: Callable[[Ref], bool] | None) -> None:
        """Fill an empty book: samples whose weights still exist are kept, everything else is generated again."""
        from_file = saved.step is None  # then no listed payload has been released
        self.version, self.fates = version, bytearray(saved.fates)
        self.last_trained = self.last_applied = step
        self.steps = {
            number: StepClaim(updated, places)
            for number, updated, places in saved.steps
            if number <= step and updated >= version
        }
        for prompt_id, attempt, prompt, last_prepared in saved.drops:
            if from_file and last_prepared >= step:  # after the checkpoint
                self.fates[prompt_id] = 0
                self._reopen(prompt_id, prompt, attempt)
        for prompt_id, attempt, prompt, claimed_by, samples in saved.groups:
            if claimed_by is not None and claimed_by <= step:
                self.fates[prompt_id] = APPLIED
                for sample in samples if from_file else ():
                    self.callbacks.release(sample.ref, "applied")
                continue
            record = self._reopen(prompt_id, prompt, attempt)
            for sample in samples:
                if sample.newest_version > version:  # of weights that no longer exist
                    self.callbacks.release(sample.ref, "lost")
                elif exists is None or exists(sample.ref):
                    record.samples[sample.index] = sample
            record.oldest = record.find_oldest()
            if len(record.samples) == self.config.group_size:
                self.move(record, "finished")
