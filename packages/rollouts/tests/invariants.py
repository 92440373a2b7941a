# SPDX-License-Identifier: Apache-2.0
"""The invariants of a ledger, over its private records. A test calls `check` after whatever it does."""

from fairlead_rollouts._book import DROPPED, NEVER

CLAIMED, FINISHED, HOLDING = ("claimed", "trained"), ("finished", "claimed"), ("pending", "finished", "claimed")


def bound(book):
    return NEVER if book.config.max_staleness is None else book.config.max_staleness


# An invariant, and the records that break it.
RULES = {
    "a group is missing from its state": lambda book, record: record.prompt_id not in book.by_state[record.state],
    "a group is open and settled": lambda book, record: book.fates[record.prompt_id] != 0,
    "a group is claimed without a step": lambda book, record: (record.step is None) == (record.state in CLAIMED),
    "a claimed group is too old": (
        lambda book, record: record.step is not None and record.version - record.oldest > bound(book)
    ),
    "a lease and its state disagree": (
        lambda book, record: bool(record.lease and record.waiting) != (record.state == "leased")
    ),
    "a sample is finished and awaited": (
        lambda book, record: any(record.waiting >> sample & 1 for sample in record.samples)
    ),
    "a finished group lacks samples": (
        lambda book, record: record.state in FINISHED and len(record.samples) < book.config.min_samples
    ),
    "a sample is newer than the trainer": (
        lambda book, record: any(sample.newest_version > book.version for sample in record.samples.values())
    ),
    "a group has another age than its samples": (
        lambda book, record: record.state in HOLDING and record.oldest != record.find_oldest()
    ),
}


def check(ledger):
    """Fail if a record contradicts another one, a counter or a rule."""
    book, records = ledger._book, list(ledger._book.records.values())
    for rule, is_wrong in RULES.items():
        assert [record.prompt_id for record in records if is_wrong(book, record)] == [], rule
    assert len(records) == book.fates.count(0)
    assert sum(map(len, book.by_state.values())) == len(records)
    claimed = sorted(prompt_id for claim in book.steps.values() for prompt_id in claim.prompt_ids)
    assert claimed == sorted(record.prompt_id for record in records if record.step is not None)
    assert all(claim.places >= len(claim.prompt_ids) + claim.unfilled for claim in book.steps.values())
    for version in {claim.version for claim in book.steps.values() if claim.version >= book.version}:
        assert book.count_places(version) <= book.config.groups_per_version
    tokens = [record.lease.token for record in records if record.lease is not None]
    assert len(set(tokens)) == len(tokens)
    assert all(token >> 32 == ledger._run for token in tokens)
    assert all(book.fates[prompt_id] == DROPPED for prompt_id in book.drops)
