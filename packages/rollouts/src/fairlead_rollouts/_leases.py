# SPDX-License-Identifier: Apache-2.0
"""From a lease to sealed siblings: what becomes of a group when its generation succeeds, fails or is taken back."""

from collections.abc import Iterable

from ._book import Book
from ._model import Lease, Ref, Sample
from ._record import Record

__all__ = ["Leases"]


def is_same(one: Ref, other: Ref) -> bool:
    """Return whether two references are of the same payload."""
    return one.value is other.value or (one.durable and one == other)


class Leases:
    """Make leases and accept their results.

    Attributes:
        run: the upper bits of every token of this process.
    """

    def __init__(self, book: Book, run: int) -> None:
        self.run = run
        self._book, self._config = book, book.config
        self._sequence = 0
        self.siblings = tuple(range(book.config.group_size))

    def make(self, record: Record, start_version: int, deadline: float | None) -> Lease:
        """Lease a pending group."""
        self._sequence += 1
        self._book.move(record, "leased")
        siblings = self.siblings
        if record.samples:
            siblings = tuple([one for one in siblings if one not in record.samples])
        token = self.run << 32 | self._sequence
        record.lease = Lease(record.ordinal, siblings, token, start_version, record.prompt, record.attempt)
        record.deadline, record.failed = deadline, False
        record.waiting = sum([1 << one for one in siblings])
        record.oldest = min(record.oldest, start_version)
        return record.lease

    def find(self, lease: Lease) -> Record | None:
        """Return the record of a lease that has not ended."""
        record = self._book.records.get(lease.ordinal)
        return record if record and record.lease and record.lease.token == lease.token else None

    def accept(self, lease: Lease, sample: Sample) -> bool:
        """Store a sealed sibling, or release its reference if the lease does not owe it any more."""
        book, sibling = self._book, sample.sibling
        book.counters.accepted += 1
        record = self.find(lease)
        if record is None or not record.waiting >> sibling & 1:
            book.counters.fenced += 1
            record = book.records.get(lease.ordinal)
            held = record and record.samples.get(sibling)
            if held and is_same(held.ref, sample.ref):  # the same call again
                book.counters.released += 1
            else:
                book.release_ref(sample.ref, "fenced")
            return False
        record.samples[sibling] = sample
        if book.journal is not None and sample.ref.durable:
            book.journal.put(record, (sample,))
        record.oldest = min(record.oldest, sample.oldest_version)
        record.waiting &= ~(1 << sibling)
        if not record.waiting:
            self._end(record)
        return True

    def give_up(self, record: Record, siblings: Iterable[int], reason: str) -> None:
        """Let siblings of a lease fail."""
        for sibling in siblings:
            record.waiting &= ~(1 << sibling)
        record.failed, record.failure = True, reason
        if not record.waiting:
            self._end(record)

    def cancel(self, record: Record) -> None:
        """End a lease without a failure."""
        record.waiting = 0
        self._end(record)

    def owed(self, record: Record) -> list[int]:
        """Return the siblings whose results are awaited."""
        return [one for one in self.siblings if record.waiting >> one & 1]

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
            book.seal(record)
            return
        if completeness.retry == "group":
            book.discard(record, "retried")
        book.return_to_pending(record, record.failure if record.failed else "cancelled")
