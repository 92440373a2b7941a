# SPDX-License-Identifier: Apache-2.0
"""The part of a ledger that generators use: leases and their results."""

import json
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ._book import Book
from ._callbacks import changes
from ._model import Lease, LedgerConfig, Ref, Sample
from ._record import Record
from ._sources import PromptSource, SequenceStream
from .exceptions import OldWeightsError

__all__ = ["RolloutSide"]

PROMPT_BYTES = 4096


def is_same(ref: Ref, other: Ref) -> bool:
    """Return whether two references are of the same payload."""
    return ref.value is other.value or (ref.durable and ref == other)


class RolloutSide:
    """The records of a ledger, and the methods of its rollout side."""

    def __init__(self, book: Book, source: PromptSource | Sequence[Any], run: int) -> None:
        self._book, self._config, self._run = book, book.config, run
        self._source: PromptSource = SequenceStream(source) if isinstance(source, Sequence) else source
        self._exhausted = False
        self._sequence = 0
        self._samples = tuple(range(book.config.group_size))
        self._lock = threading.RLock()

    @property
    def config(self) -> LedgerConfig:
        """The rules."""
        return self._config

    @property
    def version(self) -> int:
        """The trainer's version."""
        return self._book.version

    @property
    def last_trained(self) -> int | None:
        """The last step that was trained, in this process or before the checkpoint; None without one."""
        return self._book.last_trained

    @property
    def exhausted(self) -> bool:
        """Whether the source has ended and no open group can be leased again."""
        states = self._book.by_state
        return self._exhausted and not any(states[state] for state in ("pending", "leased", "finished", "claimed"))

    def room(self) -> int:
        """Return how many groups may be leased now, including pending groups that hold samples."""
        return self._book.room

    @changes
    def lease(self, count: int, *, serving_version: int | None = None, deadline: float | None = None) -> list[Lease]:
        """Lease up to `count` groups for generation: pending ones first, then new ones from the source.

        Args:
            count: the groups that the caller can start.
            serving_version: the weights of the generator; by default the oldest that `serving_lag` allows.
            deadline: when `expire` takes the leases back, on the caller's clock.

        Returns:
            Fewer leases without room, or if the source has ended.

        Raises:
            OldWeightsError: the trainer has advanced too far past `serving_version`. Nothing is leased.
        """
        book = self._book
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1.")
        oldest = max(0, book.version - self._config.serving_lag)
        start = oldest if serving_version is None else serving_version
        if start < oldest:
            raise OldWeightsError(start, oldest, book.version)
        if start > book.version:
            raise ValueError(f"serving_version is {start}, and the trainer is at {book.version}. Call advance() first.")
        available = book.room
        self._pull(min(count, available) - len(book.by_state["pending"]))
        pending = book.choose_pending(count, available - book.held)
        return [self._make_lease(record, start, deadline) for record in pending]

    def _pull(self, count: int) -> None:
        """Make prompts of the source pending. An error leaves those before it pending."""
        while count > 0 and not self._exhausted:
            try:
                prompt = self._source.get(self._book.next)
            except IndexError:
                self._exhausted = self._book.callbacks.changed = True
                return
            self._book.open(_check_prompt(prompt))
            count -= 1

    def _make_lease(self, record: Record, start_version: int, deadline: float | None) -> Lease:
        self._sequence += 1
        self._book.move(record, "leased")
        owed = self._samples
        if record.samples:
            owed = tuple([sample for sample in owed if sample not in record.samples])
        token = self._run << 32 | self._sequence
        record.lease = Lease(record.prompt_id, owed, token, start_version, record.prompt, record.attempt)
        record.deadline, record.failed = deadline, False
        record.waiting = sum([1 << sample for sample in owed])
        record.oldest = min(record.oldest, start_version)
        return record.lease

    def _find(self, lease: Lease) -> Record | None:
        """Return the record of a lease that has not ended."""
        record = self._book.records.get(lease.prompt_id)
        return record if record and record.lease and record.lease.token == lease.token else None

    @changes
    def finish(
        self,
        lease: Lease,
        sample: int,
        ref: Ref,
        *,
        oldest_version: int | None = None,
        newest_version: int | None = None,
    ) -> bool:
        """Record one finished rollout.

        Args:
            lease: the lease under which it was generated.
            sample: its number in the group.
            ref: its payload.
            oldest_version: the oldest weights of tokens that carry loss; by default the start version of the lease.
            newest_version: the newest weights; by default the trainer's version.

        Returns:
            False if the result is late: the lease has ended, or this sample is finished. Then `ref` is released.
        """
        return self._accept(lease, self._make_sample(lease, sample, ref, oldest_version, newest_version))

    @changes
    def finish_many(
        self,
        results: Iterable[tuple[Lease, int, Ref]],
        *,
        oldest_version: int | None = None,
        newest_version: int | None = None,
    ) -> list[bool]:
        """Record finished rollouts, each as in `finish`, all with the same versions.

        Returns:
            For each result whether it was accepted.
        """
        samples = [
            (lease, self._make_sample(lease, sample, ref, oldest_version, newest_version))
            for lease, sample, ref in results
        ]
        return [self._accept(lease, sample) for lease, sample in samples]

    def _make_sample(self, lease: Lease, sample: int, ref: Ref, oldest: int | None, newest: int | None) -> Sample:
        if not 0 <= sample < self._config.group_size:
            raise ValueError(f"sample is {sample}; a group has {self._config.group_size} samples, counted from 0.")
        version = self._book.version
        newest = version if newest is None else newest
        oldest = lease.start_version if oldest is None else oldest
        # A late result may be of versions that a restore has erased; it is refused for its token.
        if not 0 <= oldest <= newest <= version and self._find(lease) is not None:
            raise ValueError(
                f"oldest_version is {oldest} and newest_version is {newest}; they must be in ascending order, from 0 "
                f"to the trainer's version, which is {version}."
            )
        return Sample(sample, ref, oldest, newest)

    def _accept(self, lease: Lease, sample: Sample) -> bool:
        """Store a finished sample, or release its reference if the lease does not owe it any more."""
        book, index = self._book, sample.index
        record = self._find(lease)
        if record is None or not record.waiting >> index & 1:
            book.counters.fenced += 1
            record = book.records.get(lease.prompt_id)
            held = record and record.samples.get(index)
            if not (held and is_same(held.ref, sample.ref)):  # otherwise it is the same call again
                book.callbacks.release(sample.ref, "fenced")
            return False
        record.samples[index] = sample
        if book.callbacks.file is not None:
            book.callbacks.file.note_change()
        record.oldest = min(record.oldest, sample.oldest_version)
        record.waiting &= ~(1 << index)
        if not record.waiting:
            self._end(record)
        return True

    @changes
    def fail(self, lease: Lease, samples: Iterable[int] | None = None, *, reason: str) -> bool:
        """Give up samples of a lease; a failure never becomes a sample.

        Args:
            lease: the lease.
            samples: the numbers of the samples that failed; None for all that are not finished.
            reason: what `on_event` and `explain` say of it. `statistics` counts a group that it drops as "failed".

        Returns:
            False if the lease has ended, or all of these samples are finished.
        """
        named = self._samples if samples is None else tuple(samples)
        if wrong := [sample for sample in named if sample not in self._samples]:
            size = self._config.group_size
            raise ValueError(f"samples has {wrong}; a group has {size} samples, counted from 0.")
        record = self._find(lease)
        failed = record is not None and any(record.waiting >> sample & 1 for sample in named)
        if record is not None and failed:
            self._give_up(record, named, reason)
        return failed

    def _give_up(self, record: Record, samples: Iterable[int], reason: str) -> None:
        for sample in samples:
            record.waiting &= ~(1 << sample)
        record.failed, record.failure = True, reason
        if not record.waiting:
            self._end(record)

    @changes
    def cancel(self, lease: Lease) -> bool:
        """Take a lease back, for example for an update of the weights. This costs no attempt.

        Returns:
            False if the lease has ended.
        """
        record = self._find(lease)
        if record is not None:
            record.waiting = 0
            self._end(record)
        return record is not None

    @changes
    def expire(self, now: float) -> list[Lease]:
        """Let all leases fail whose deadline has passed.

        Returns:
            These leases, so that the caller can abort their generation.
        """
        leased = self._book.by_state["leased"].values()
        late = [record for record in leased if record.deadline is not None and record.deadline <= now]
        leases = [record.lease for record in late if record.lease is not None]
        for record in late:
            self._give_up(record, self._samples, "expired")
        return leases

    def _end(self, record: Record) -> None:
        """Decide what becomes of a group whose lease owes no more results."""
        book, completeness = self._book, self._config.completeness
        complete = len(record.samples) == self._config.group_size
        if not complete and record.failed:
            if record.attempt < completeness.max_attempts:
                record.attempt += 1
            elif len(record.samples) < self._config.min_samples:
                book.drop(record, "failed", record.failure)
                return
            else:
                complete = True
        if complete:
            book.finish(record)
            return
        if completeness.retry == "group":
            book.discard(record, "retried")
        book.return_to_pending(record, record.failure if record.failed else "cancelled")


def _check_prompt(prompt: Any) -> Any:
    try:
        text = json.dumps(prompt)
    except (TypeError, ValueError) as error:
        raise ValueError(f"A prompt must be a JSON value, such as an index of a dataset: {error}") from None
    if len(text) > PROMPT_BYTES:
        raise ValueError(
            f"A prompt has {len(text)} bytes of JSON; at most {PROMPT_BYTES} are kept. Use a reference to it."
        )
    # As the next process reads it: a tuple has become a list.
    return json.loads(text)
