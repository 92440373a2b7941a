# SPDX-License-Identifier: Apache-2.0
"""From a snapshot to the records of a new process."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from .._book import Book
from .._model import Ref
from .._record import StepClaim
from ..exceptions import SnapshotError
from .snapshot import Snapshot, read_snapshot

__all__ = ["choose_snapshot", "restore_book"]


def choose_snapshot(file: Path | None, directory: Path | None, step: int, group_size: int) -> Snapshot:
    """Return the newest snapshot from which the state after a step can be derived.

    A file of the same job knows what has finished since the checkpoint. A file of another job is set aside.
    """
    newest = None
    if file is not None and file.exists():
        try:
            newest = read_snapshot(file)
        except SnapshotError:
            if directory is None:
                raise
            set_aside(file)
    if directory is None:
        if newest is None:
            remedy = "Pass the directory of a checkpoint, or make a new Ledger to begin at prompt 0."
            raise SnapshotError(str(file), "the file does not exist", remedy)
        saved, path = newest, str(file)
    else:
        saved, path = read_snapshot(directory), str(directory)
        if newest is not None and (newest.ledger != saved.ledger or newest.runs[: len(saved.runs)] != saved.runs):
            assert file is not None
            set_aside(file)
        elif newest is not None and newest.step is None and newest.covers(step):
            saved, path = newest, str(file)
    if not saved.covers(step):
        first, last = (saved.step,) * 2 if saved.step is not None else (saved.last_applied or 0, saved.last_step or 0)
        steps = str(first) if first == last else f"from {first} to {last}"
        raise SnapshotError(path, f"its step is {steps}, not {step}", f"Pass step={last}, or another checkpoint.")
    if saved.group_size != group_size:
        remedy = f"Pass group_size={saved.group_size}, or the directory of another checkpoint."
        raise SnapshotError(path, f"its group_size is {saved.group_size}, not {group_size}", remedy)
    return saved


def set_aside(file: Path) -> None:
    """Rename a file that a new ledger would overwrite."""
    aside = file.with_name(f"{file.name}.aside")
    os.replace(file, aside)
    warnings.warn(
        f"The file {str(file)!r} was renamed to {aside.name!r}: it does not continue this ledger.", stacklevel=2
    )


def restore_book(book: Book, saved: Snapshot, *, step: int, version: int, exists: Callable[[Ref], bool] | None) -> None:
    """Fill an empty book: samples whose weights still exist are kept, everything else is generated again."""
    from_file = saved.step is None  # then no listed payload has been released
    book.version, book.settled, book.next = version, saved.settled, saved.next
    book.last_trained = book.last_applied = step
    for number, updated, places in saved.steps:
        if number <= step and updated >= version:
            book.steps[number] = StepClaim(updated, places)
            book.consume(updated, places)
    for prompt_id, attempt, prompt, last_prepared in saved.drops:
        if from_file and last_prepared >= step:  # after the checkpoint
            book.settled.undo_drop(prompt_id)
            book.reopen(prompt_id, prompt, attempt)
    for prompt_id, attempt, prompt, claimed_by, samples in saved.groups:
        if claimed_by is not None and claimed_by <= step:
            book.settled.add(prompt_id, dropped=False)
            for sample in samples if from_file else ():
                book.callbacks.release(sample.ref, "applied")
            continue
        record = book.reopen(prompt_id, prompt, attempt)
        held = {}
        for sample in samples:
            if sample.newest_version > version:  # of weights that no longer exist
                book.callbacks.release(sample.ref, "lost")
            elif exists is None or exists(sample.ref):
                held[sample.index] = sample
        if held:
            book.fill(record, held)
