# SPDX-License-Identifier: Apache-2.0
"""A simulated job with stragglers: the bound holds, no claim waits forever, and slow prompts are trained as often."""

import pytest
import simulation

SEEDS = 40
SETTINGS = [
    {"bound": 0, "places": 2},
    {"bound": 2, "places": 8},
    {"bound": 4, "places": 2},
    {"bound": 1, "places": 4, "batch": 2},
    {"bound": 2, "places": 4, "prefetch": 1},
    {"bound": 3, "places": 4, "lag": 2},
    {"bound": 2, "places": 6, "lag": 1, "prefetch": 1, "batch": 3, "minimum": 1},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_wait(options):
    """With "wait" no group becomes too old, and the share of slow prompts among the trained ones is theirs."""
    steps = 60 * options["places"] // options.get("batch", options["places"])
    runs = [simulation.simulate(seed=seed, steps=steps, **options) for seed in range(SEEDS)]
    assert max(run.worst for run in runs) <= options["bound"]
    assert sum(run.lost for run in runs) == 0
    assert options["bound"] == 0 or sum(run.waits for run in runs) > 0
    share = sum(run.slow_trained for run in runs) / sum(run.trained for run in runs)
    assert share == pytest.approx(simulation.SLOW_SHARE, abs=0.01)


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
def test_without_waiting(on_stale):
    """The bound holds, which admission alone does not; "drop" trains almost no slow prompt, and losses are counted."""
    assert max(simulation.simulate(bound=None, places=4, seed=seed).worst for seed in range(5)) > 4
    runs = [simulation.simulate(bound=1, places=4, on_stale=on_stale, seed=seed) for seed in range(5)]
    assert max(run.worst for run in runs) <= 1
    assert all(run.lost > 10 for run in runs)
    share = sum(run.slow_trained for run in runs) / sum(run.trained for run in runs)
    assert share < 0.02 if on_stale == "drop" else share > 0.07
