# SPDX-License-Identifier: Apache-2.0
"""Each policy is a pure function of the open groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_rollouts import OldestFirst, OpenGroup, ReadyFirst, View

GROUPS = [
    # prompt_id, ready, oldest version
    OpenGroup(0, False, 1),
    OpenGroup(1, True, 3),
    OpenGroup(2, True, 2),
    OpenGroup(3, True, 1),
    OpenGroup(4, True, 2),
]


def choose(policy, count, groups=GROUPS):
    return policy.select(View(version=3, max_staleness=2, groups=tuple(groups)), count)


@pytest.mark.parametrize(
    ("policy", "count", "prompt_ids"),
    [
        (OldestFirst(), 3, (3, 2, 4)),
        (ReadyFirst(), 2, (1, 2)),
    ],
)
def test_selection(policy, count, prompt_ids):
    """The choice, in the order in which the groups are trained."""
    assert choose(policy, count) == prompt_ids


@given(
    groups=st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=20),
    count=st.integers(1, 9),
    policy=st.sampled_from([OldestFirst(), ReadyFirst()]),
    order=st.randoms(use_true_random=False),
)
def test_choices_are_ready_and_do_not_depend_on_the_order(groups, count, policy, order):
    """A policy takes ready groups, none twice, at most as many as requested, whatever the order of the view."""
    groups = [OpenGroup(prompt_id, *one) for prompt_id, one in enumerate(groups)]
    chosen = choose(policy, count, groups)
    assert set(chosen) <= {group.prompt_id for group in groups if group.ready}
    assert len(set(chosen)) == len(chosen) <= count
    order.shuffle(groups)
    assert choose(policy, count, groups) == chosen
