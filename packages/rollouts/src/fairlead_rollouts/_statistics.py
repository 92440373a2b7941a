# SPDX-License-Identifier: Apache-2.0
"""A ledger in numbers, and a group or a ledger as text for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._book import APPLIED, DROPPED, NEVER, Book
from ._model import State

__all__ = ["Statistics", "count", "draw_bars", "explain_group", "explain_ledger"]

STATES: tuple[State, ...] = ("pending", "leased", "finished", "claimed", "trained", "applied", "dropped")
BAR, OLDEST = 40, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Describe the state of a ledger in numbers.

    The groups in each state are counted over all runs of the job, and everything else since this ledger was made.

    Attributes:
        version: the trainer's version.
        pending, leased, finished, claimed, trained, applied, dropped: the groups in each state.
        room: the groups that may be leased now.
        oldest_open: the age in versions of the oldest open group, or None.
        drops: dropped groups by reason.
        staleness: claimed groups by staleness, in versions.
        requeued: groups that became too old and were requeued, by the attempt that was lost.
        regenerated: finished samples that were released because they have to be generated again.
        fenced: late results that were refused.
        waits: claims that had to wait for older groups.
        blocked_by: the groups that the last of these claims waited for.
    """

    version: int
    pending: int
    leased: int
    finished: int
    claimed: int
    trained: int
    applied: int
    dropped: int
    room: int
    oldest_open: int | None
    drops: Mapping[str, int]
    staleness: Mapping[int, int]
    requeued: Mapping[int, int]
    regenerated: int
    fenced: int
    waits: int
    blocked_by: tuple[int, ...]


def count(book: Book) -> Statistics:
    """Return the numbers of a ledger."""
    oldest = min([record.oldest for record in book.records.values()], default=book.version)
    numbers: dict[str, Any] = {state: len(records) for state, records in book.by_state.items()}
    for name, number in vars(book.counters).items():
        numbers[name] = dict(sorted(number.items())) if isinstance(number, dict) else number
    return Statistics(
        version=book.version,
        applied=book.fates.count(APPLIED),
        dropped=book.fates.count(DROPPED),
        room=book.room + len(book.list_held()),
        oldest_open=book.version - min(oldest, book.version) if book.records else None,
        **numbers,
    )


def explain_group(book: Book, prompt_id: int, state: State) -> str:
    """Return what is known of a group as text."""
    record, size = book.records.get(prompt_id), book.config.group_size
    if record is None:
        return f"Prompt {prompt_id} is {state}."
    parts = [f"Prompt {prompt_id} is {state}, attempt {record.attempt} of {book.config.completeness.max_attempts}."]
    parts.append(f"{len(record.samples)} of {size} samples are finished.")
    if record.failure:
        parts.append(f"A sample has failed: {record.failure}.")
    if record.lease is not None:
        owed = [sample for sample in range(size) if record.waiting >> sample & 1]
        parts.append(f"Its lease started at version {record.lease.start_version} and owes samples {owed}.")
    if record.step is not None:
        age = record.version - record.oldest
        parts.append(f"Step {record.step} trains it at version {record.version}, {age} versions after its weights.")
    elif record.oldest != NEVER:
        bound = book.config.max_staleness
        last = "" if bound is None else f"; {record.oldest + bound} is the last version that may train it"
        next_version = book.next_place[0]
        parts.append(f"Its oldest version is {record.oldest}, and the next claim trains at {next_version}{last}.")
    return " ".join(parts)


def draw_bars(title: str, counts: Mapping[Any, int]) -> str:
    """Return a title, and a line with a bar for each count."""
    most = max(counts.values(), default=0) or 1
    bars = [(str(name), number, "█" * -(-number * BAR // most)) for name, number in counts.items()]
    return "\n".join([title, *(f"  {name:9} {number:9,} {bar}".rstrip() for name, number, bar in bars)])


def explain_ledger(book: Book, numbers: Statistics) -> str:
    """Return the groups in each state, the staleness of claims, drops by reason and the three oldest groups."""
    parts = [f"Ledger at version {numbers.version}, room() is {numbers.room:,}"]
    parts.append(draw_bars("groups", {state: getattr(numbers, state) for state in STATES}))
    if numbers.staleness:
        parts.append(draw_bars("claimed groups by staleness", numbers.staleness))
    if numbers.drops:
        parts.append(draw_bars("dropped groups by reason", numbers.drops))
    waiting = [record for record in book.records.values() if record.state != "trained"]
    oldest = sorted(waiting, key=lambda record: (record.oldest, record.prompt_id))[:OLDEST]
    return "\n".join([*parts, *(explain_group(book, record.prompt_id, record.state) for record in oldest)])
