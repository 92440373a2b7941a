# SPDX-License-Identifier: Apache-2.0
"""Each policy is a pure function of the open groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_rollouts import Claim, InOrder, OldestFirst, OpenGroup, ReadyFirst, View, WeightFifo, Windowed

GROUPS = [
    # ordinal, ready, oldest version, target step
    OpenGroup(0, False, 1, 7),
    OpenGroup(1, True, 3, 7),
    OpenGroup(2, True, 2, 7),
    OpenGroup(3, True, 1, 8),
    OpenGroup(4, True, 2, 8),
]


def choose(policy, count, groups=GROUPS):
    return policy.select(View(step=7, version=3, max_staleness=2, groups=tuple(groups)), count)


@pytest.mark.parametrize(
    ("policy", "count", "ordinals", "blocked_by"),
    [
        (OldestFirst(), 3, (3, 2, 4), ()),
        (ReadyFirst(), 2, (1, 2), ()),
        (InOrder(groups_per_step=3), 2, (1, 2), ()),
        (InOrder(groups_per_step=3), 3, (1, 2), (0,)),
        (WeightFifo(), 1, (3,), ()),
        (WeightFifo(), 2, (3,), (0,)),
        (Windowed(), 2, (1, 2), ()),
        (Windowed(freshest_first=True), 3, (1, 2, 4), ()),
    ],
)
def test_selection(policy, count, ordinals, blocked_by):
    """The choice and the groups that the policy waits for."""
    selection = choose(policy, count)
    assert (selection.ordinals, selection.blocked_by) == (ordinals, blocked_by)


@given(
    groups=st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(5, 9)), max_size=20),
    count=st.integers(1, 9),
    policy=st.sampled_from(
        [
            OldestFirst(),
            ReadyFirst(),
            InOrder(groups_per_step=2),
            WeightFifo(),
            Windowed(),
            Windowed(freshest_first=True),
        ]
    ),
    order=st.randoms(use_true_random=False),
)
def test_choices_are_ready_and_do_not_depend_on_the_order(groups, count, policy, order):
    """A policy takes ready groups, none twice, at most as many as requested, whatever the order of the view."""
    groups = [OpenGroup(ordinal, *one) for ordinal, one in enumerate(groups)]
    selection = choose(policy, count, groups)
    ready = {group.ordinal for group in groups if group.ready}
    assert set(selection.ordinals) <= ready
    assert len(set(selection.ordinals)) == len(selection.ordinals) <= count
    assert set(selection.blocked_by) & ready == set()
    order.shuffle(groups)
    assert choose(policy, count, groups) == selection


def test_weight_fifo_passes_a_group_that_no_claim_accepts(make_ledger, finish):
    """An unfinished group older than the bound does not block the others."""
    ledger = make_ledger(policy=WeightFifo(), on_stale="drop", groups_per_version=1, lookahead=5)
    slow, *others = ledger.lease(4)
    ledger.advance(2)
    finish(ledger, others, oldest_version=1)
    claim = ledger.claim(1, 1)
    assert isinstance(claim, Claim), claim
    assert [group.ordinal for group in claim.groups] == [1]
    finish(ledger, [slow])
    ledger.sweep()
    assert ledger.state(0) == "dropped"
