# SPDX-License-Identifier: Apache-2.0
"""Tests that the simulation finds defects that the group once had, when their fixes are taken back."""

from functools import partial

import pytest

from .exploration import explore
from .scripts import run_group
from .seam import forget_the_scope, send_only_the_epoch, use_dead_slots

MOST_RUNS = 1000


# Each with the rule that it breaks, and with options of the script.
@pytest.mark.parametrize(
    ("revert", "rule", "options"),
    [
        (send_only_the_epoch, "stale facts", {}),
        (forget_the_scope, "waits in vain", {}),
        (use_dead_slots, "dead slot", {"faults": ("node",)}),
    ],
)
def test_reverted(revert, rule, options, monkeypatch):
    """A run within the first ones breaks the rule."""
    with monkeypatch.context() as patch:
        revert(patch)
        failure = explore(partial(run_group, **options), range(MOST_RUNS))
    assert failure.partition("Error: ")[2].startswith(f"{rule}: ")
