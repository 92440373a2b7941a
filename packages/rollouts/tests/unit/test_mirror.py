# SPDX-License-Identifier: Apache-2.0
"""Tests of the ledger that follows the buffer of a framework."""

from fairlead_rollouts._mirror import MirrorLedger


class Counted(dict):
    """A dictionary that counts how often it is merged with another one, which copies all of it."""

    merges = 0

    def __or__(self, other):
        self.merges += 1
        return super().__or__(other)


def test_many_groups():
    """Each look of a framework at its buffer makes an update, which copies the groups once, however many there are."""
    ledger = MirrorLedger(100, None, lookahead=None, on_stale="drop")
    ledger.ordinals = Counted()
    listed = {f"group {number}": 0 for number in range(100)}
    for merges in (1, 2):
        ledger.update(listed, (), ())
        assert ledger.ordinals.merges == merges
    assert len(ledger.ordinals) == 100
