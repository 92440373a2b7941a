# SPDX-License-Identifier: Apache-2.0
"""A job on pretended time: one prompt in ten takes long, and the trainer may claim ahead.

`python packages/rollouts/tests/simulation.py` prints the table of docs/guides/rollouts.md.
"""

import heapq
import random
import sys
from types import SimpleNamespace

from invariants import check

from fairlead_rollouts import Claim, Ledger, LedgerConfig, OldestFirst, ReadyFirst, Ref

SLOW_SHARE = 0.1


def simulate(*, bound, places, seed, on_stale="wait", lag=0, prefetch=0, batch=None, steps=60, minimum=None):
    """Train so many steps, and raise an error if no event is left before that.

    A bound of None has the admission of K = 1 without a bound at the claim. `places` are groups for each version,
    `batch` those of each step, `lag` versions by which generators lag behind, and `prefetch` the steps that are claimed
    before the current one has been trained.
    """
    batch = batch or places
    gate = 1 if bound is None else bound
    config = LedgerConfig(
        group_size=1,
        groups_per_version=places,
        max_staleness=bound,
        lookahead=gate,
        serving_lag=lag,
        policy=ReadyFirst() if bound is None else OldestFirst(),
        on_stale="requeue" if bound is None else on_stale,
    )
    draw = random.Random(seed)
    ledger = Ledger(config, range(1_000_000))
    slow, finishing, queue = {}, [], []
    now, step, trained, outcome = 0.0, 0, 0, SimpleNamespace(worst=0, slow_trained=0, trained=0)
    ends, consumed, requested = None, {}, {}
    while trained < steps:
        while room := ledger.room():
            serving = max(0, ledger.version - draw.randint(0, lag))
            for lease in ledger.lease(min(room, 64), serving_version=serving):
                is_slow = slow.setdefault(lease.prompt_id, draw.random() < SLOW_SHARE)
                heapq.heappush(
                    finishing, (now + (draw.randint(20, 60) if is_slow else draw.randint(1, 3)), lease.token, lease)
                )
        while len(queue) <= prefetch:
            count = min(batch, ledger._book.next_place[1])
            claim = ledger.claim(step + 1, count, minimum=minimum)
            if not isinstance(claim, Claim):
                break
            step += 1
            requested[step] = count  # a step that takes fewer groups uses up all its places
            queue.append(claim)
        if ends is None and queue:
            ends = now + 4
        if ends is not None and (not finishing or ends <= finishing[0][0]):
            now, ends = ends, None
            claim = queue.pop(0)
            assert claim.version == ledger.version
            for group in claim.groups:
                outcome.worst = max(outcome.worst, ledger.version - group.oldest_version)
                outcome.slow_trained += slow[group.prompt_id]
            outcome.trained += len(claim.groups)
            consumed[claim.version] = consumed.get(claim.version, 0) + requested.pop(claim.step)
            trained = claim.step
            ledger.advance(ledger.version + (consumed[claim.version] == places), trained=trained)
        elif finishing:
            now, _, lease = heapq.heappop(finishing)
            ledger.finish(lease, 0, Ref(lease.prompt_id))
        else:
            raise AssertionError(f"deadlock after {trained} steps: {ledger.statistics()}")
    numbers = ledger.statistics()
    outcome.lost = sum(numbers.requeued.values()) + numbers.drops.get("stale", 0)
    outcome.ticks, outcome.waits = now, numbers.waits
    check(ledger)
    return outcome


def table():
    """Yield a line for each policy, for 120 steps in 40 orders."""
    for bound, places in ((1, 4), (2, 8)):
        for title, options in (
            ("no bound", {"bound": None}),
            ("wait", {"bound": bound}),
            ("requeue", {"bound": bound, "on_stale": "requeue"}),
            ("drop", {"bound": bound, "on_stale": "drop"}),
        ):
            runs = [simulate(places=places, seed=seed, steps=120, **options) for seed in range(40)]
            names = "slow_trained", "trained", "lost", "ticks"
            slow, trained, lost, ticks = (sum(getattr(run, name) for run in runs) for name in names)
            means = f"slow {slow / trained:.1%}, lost {lost / 40:.0f}, ticks {ticks / 40:.0f}"
            yield f"K {bound}, P {places}, {title}: {max(run.worst for run in runs)}, {means}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table())
