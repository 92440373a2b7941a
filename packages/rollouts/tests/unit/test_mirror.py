# SPDX-License-Identifier: Apache-2.0
"""Tests of the ledger that follows the buffer of a framework."""

import time

from fairlead_rollouts._mirror import MirrorLedger


def _measure(count: int) -> float:
    """Return the CPU seconds of an update with so many groups, all of which the ledger knows."""
    ledger = MirrorLedger(count, None, lookahead=None, on_stale="drop")
    listed = {f"group {number}": 0 for number in range(count)}
    ledger.update(listed, (), ())
    took = []
    for _ in range(5):
        began = time.process_time()
        ledger.update(listed, (), ())
        took.append(time.process_time() - began)
    return min(took)


def test_many_groups():
    """An update, which each look of a framework at its buffer causes, costs in proportion to the groups listed."""
    assert _measure(8000) < 30 * _measure(1000)
