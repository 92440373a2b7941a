# SPDX-License-Identifier: Apache-2.0
"""The invariants of a ledger, and the explanation of one group."""

from collections.abc import Callable, Iterator

from ._book import Book
from ._model import State
from ._record import NEVER, Record
from .exceptions import InvariantError

__all__ = ["check_book", "explain_group"]

CLAIMED, FINISHED, HOLDING = ("claimed", "trained"), ("sealed", "claimed"), ("pending", "sealed", "claimed")
# An invariant, how it is broken, and the records that break it.
RULES: tuple[tuple[str, str, Callable[[Book, Record], bool]], ...] = (
    ("I1", "groups are missing from their state", lambda book, one: one.ordinal not in book.by_state[one.state]),
    ("I1", "groups are open and settled", lambda book, one: book.settled.is_settled(one.ordinal)),
    ("I1", "groups are open and unseen", lambda book, one: one.ordinal >= book.next),
    ("I2", "the frontier passes open groups", lambda book, one: one.ordinal < book.settled.frontier),
    ("I2", "groups are claimed without a step", lambda book, one: (one.step is None) == (one.state in CLAIMED)),
    (
        "I3",
        "claimed groups are too old",
        lambda book, one: one.step is not None and one.version - one.oldest > bound(book),
    ),
    (
        "I4",
        "a lease and its state disagree",
        lambda book, one: bool(one.lease and one.waiting) != (one.state == "leased"),
    ),
    (
        "I5",
        "siblings are finished and awaited",
        lambda book, one: any(one.waiting >> sibling & 1 for sibling in one.samples),
    ),
    (
        "I5",
        "finished groups lack samples",
        lambda book, one: one.state in FINISHED and len(one.samples) < book.config.min_samples,
    ),
    (
        "I5",
        "samples are newer than the trainer",
        lambda book, one: any(it.newest_version > book.version for it in one.samples.values()),
    ),
    (
        "I7",
        "groups have another age than their samples",
        lambda book, one: one.state in HOLDING and one.oldest != one.find_oldest(),
    ),
)


def bound(book: Book) -> int:
    """Return the bound K, or a number above every age."""
    return NEVER if book.config.max_staleness is None else book.config.max_staleness


def check_book(book: Book, run: int) -> None:
    """Raise an `InvariantError` if a record contradicts another one, a counter or a rule.

    Args:
        book: the records.
        run: the run that every current token belongs to.
    """
    records = list(book.records.values())
    for invariant, found, is_wrong in RULES:
        if wrong := [one.ordinal for one in records if is_wrong(book, one)]:
            raise InvariantError(invariant, found, tuple(wrong))
    for invariant, found, wrong_total in _check_totals(book, records, run):
        if wrong_total:
            raise InvariantError(invariant, found, ())


def _check_totals(book: Book, records: list[Record], run: int) -> Iterator[tuple[str, str, bool]]:
    settled, counters = book.settled, book.counters
    known = len(records) + settled.applied + settled.dropped
    yield "I1", f"{known} groups are known, and {book.next} were seen", known != book.next
    yield "I1", "a state holds other groups", sum(map(len, book.by_state.values())) != len(records)
    yield "I2", "the frontier stands at a settled group", settled.is_settled(settled.frontier)
    claimed = sorted(ordinal for ordinals in book.claims.values() for ordinal in ordinals)
    yield (
        "I2",
        "the claims name other groups",
        claimed != sorted(one.ordinal for one in records if one.step is not None),
    )
    tokens = [one.lease.token for one in records if one.lease is not None]
    yield "I4", "leases share a token", len(set(tokens)) != len(tokens)
    yield "I4", "tokens belong to another run", any(token >> 32 != run for token in tokens)
    held = sum(len(one.samples) for one in records)
    counted = f"{counters.accepted} references were accepted, {counters.released} released, {held} are held"
    yield "I6", counted, counters.accepted != counters.released + held
    holding = sum(one.state == "pending" and bool(one.samples) for one in records)
    yield "I7", f"{holding} pending groups hold samples, {book.held} are counted", holding != book.held


def explain_group(book: Book, ordinal: int, state: State, at: int) -> str:
    """Return what is known of a group as text; `at` is the version that trains the next claim."""
    record, size = book.records.get(ordinal), book.config.group_size
    if record is None:
        return f"Ordinal {ordinal} is {state}."
    parts = [f"Ordinal {ordinal} is {state}, attempt {record.attempt} of {book.config.completeness.max_attempts}."]
    parts.append(f"{len(record.samples)} of {size} siblings are finished.")
    if record.failure:
        parts.append(f"A sibling has failed: {record.failure}.")
    if record.lease is not None:
        owed = [one for one in range(size) if record.waiting >> one & 1]
        parts.append(f"Its lease started at version {record.lease.start_version} and owes siblings {owed}.")
    if record.step is not None:
        age = record.version - record.oldest
        parts.append(f"Step {record.step} trains it at version {record.version}, {age} versions after its weights.")
    elif record.oldest != NEVER:
        last = "" if bound(book) == NEVER else f"; {record.oldest + bound(book)} is the last version that may train it"
        parts.append(f"Its oldest version is {record.oldest}, and the next claim trains at {at}{last}.")
    return " ".join(parts)
