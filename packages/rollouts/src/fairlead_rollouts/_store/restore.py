# SPDX-License-Identifier: Apache-2.0
"""From a snapshot and a journal to the records of a new process."""

import warnings
from collections.abc import Callable
from typing import Any

from .._book import Book
from .._model import Ref, Sample
from .._record import Record
from .journal import Journal
from .schema import load_sample
from .snapshot import Snapshot

__all__ = ["Salvage", "restore_book"]


class Salvage:
    """Samples of ordinals after the snapshot, which wait until their prompts have been read again."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, dict[int, Sample]]] = {}

    @property
    def last(self) -> int:
        """The last ordinal that has samples, or -1."""
        return max(self._found, default=-1)

    def add(self, ordinal: int, prompt: Any, sample: Sample) -> None:
        """Keep a sample."""
        self._found.setdefault(ordinal, (prompt, {}))[1][sample.sibling] = sample

    def attach(self, book: Book, record: Record) -> None:
        """Give a new record the samples of its ordinal, if its prompt is the same as before."""
        prompt, samples = self._found.pop(record.ordinal, (None, {}))
        if samples:
            book.counters.accepted += len(samples)
            if prompt == record.prompt:
                book.fill(record, samples)
                return
            warnings.warn(
                f"Prompt {record.ordinal} is {record.prompt!r}, and the journal has samples of {prompt!r}. They are "
                "released and generated again. Restore the source to its state at the checkpoint.",
                stacklevel=2,
            )
            book.release(record, samples, "lost")


def restore_book(
    book: Book,
    snapshot: Snapshot,
    journal: Journal | None,
    *,
    version: int,
    exists: Callable[[Ref], bool] | None,
) -> Salvage:
    """Fill an empty book: samples whose weights still exist are kept, everything else is generated again.

    Args:
        book: the book of the new process.
        snapshot: the snapshot of the checkpoint.
        journal: the journal of the process that ended.
        version: the version of the weights in the checkpoint; later versions are lost.
        exists: whether a durable payload can still be read; None if all can.

    Returns:
        The samples of ordinals that the snapshot has not seen.
    """
    book.version, book.settled, book.next = version, snapshot.settled, snapshot.next
    book.last_trained = book.last_applied = snapshot.step
    book.consumed = {one: count for one, count in snapshot.consumed.items() if one >= version}
    for ordinal, (attempt, prompt) in snapshot.prompts.items():
        book.reopen(ordinal, prompt, attempt)
    stored = journal.load(snapshot.ledger, snapshot.runs) if journal is not None else None
    prompts, rows = (dict(snapshot.prompts), snapshot.samples) if stored is None else stored
    held: dict[int, dict[int, Sample]] = {}
    salvage = Salvage()
    for row in rows:
        ordinal, sample = row[0], load_sample(row)
        record = book.records.get(ordinal)
        kept = record is not None or ordinal >= snapshot.next
        if not kept or sample.newest_version > version:
            # A step that the checkpoint covers has trained it, or weights that no longer exist have generated it.
            book.counters.accepted += 1
            book.release_ref(sample.ref, "lost" if kept else "applied")
        elif exists is None or exists(sample.ref):
            if record is not None:
                held.setdefault(ordinal, {})[sample.sibling] = sample
            elif ordinal in prompts:
                salvage.add(ordinal, prompts[ordinal][1], sample)
    for ordinal, samples in held.items():
        book.counters.accepted += len(samples)
        book.fill(book.records[ordinal], samples)
    return salvage
