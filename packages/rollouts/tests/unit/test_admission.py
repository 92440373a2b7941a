# SPDX-License-Identifier: Apache-2.0
"""How many groups may be open, and when a claim has to wait."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_rollouts import OpenGroup, View, room_for
from fairlead_rollouts._admission import find_blockers

LIMITS = {"lookahead": 2, "serving_lag": 0, "groups_per_version": 4}


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"leased": 0, "finished": 0, "ahead": 0}, 12),
        ({"leased": 3, "finished": 2, "ahead": 4}, 3),
        ({"leased": 9, "finished": 9, "ahead": 9}, 0),
        ({"leased": 3, "finished": 2, "ahead": 4, "serving_lag": 1}, 0),
        ({"leased": 3, "finished": 2, "ahead": 0, "max_leased": 4}, 1),
        ({"leased": 3, "finished": 2, "ahead": 0, "max_open": 7}, 2),
        ({"leased": 3, "finished": 2, "ahead": 0, "lookahead": None}, sys.maxsize),
    ],
)
def test_room(options, room):
    """The room is the smallest of the three limits, and never negative."""
    assert room_for(**{**LIMITS, **options}) == room


def view(groups, *, version=5, bound=1):
    return View(version=version, max_staleness=bound, groups=tuple(OpenGroup(*one) for one in groups))


@pytest.mark.parametrize(
    ("groups", "taken", "left", "blockers"),
    [
        # Due in version 5: two groups, of which one is taken and one is unfinished, with no place left.
        ([(0, True, 4), (1, False, 4)], [0], 0, (1,)),
        ([(0, True, 4), (1, False, 4)], [0], 1, ()),
        # Due in version 6, where two places are left.
        ([(0, True, 4), (1, False, 5), (2, False, 5)], [0], 0, ()),
        ([(0, True, 4), (1, False, 5), (2, False, 5), (3, False, 5)], [0], 0, (1, 2, 3)),
        # Too many are due, but all of them are finished: waiting does not help.
        ([(0, True, 4), (1, True, 4), (2, True, 4)], [0], 0, ()),
        # It is too late for an unfinished group of version 3, so it counts no more.
        ([(0, True, 4), (1, False, 3)], [0], 0, ()),
    ],
)
def test_blockers(groups, taken, left, blockers):
    """A claim waits for unfinished groups that could not be trained in time after it."""
    assert find_blockers(view(groups), taken, left, groups_per_version=2) == blockers


@given(
    groups=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12),
    places=st.integers(1, 4),
    count=st.integers(1, 4),
)
def test_a_claim_without_blockers_can_be_scheduled(groups, places, count):
    """If nothing blocks a claim, and the rest can be finished, a schedule by deadline trains every group in time."""
    bound, version = 2, 3
    groups = [
        (prompt_id, ready, oldest) for prompt_id, (ready, oldest) in enumerate(groups) if oldest >= version - bound
    ]
    ready = sorted(((oldest, prompt_id) for prompt_id, done, oldest in groups if done))[:count]
    taken, left = [prompt_id for _, prompt_id in ready], max(0, places - len(ready))
    blockers = find_blockers(view(groups, version=version, bound=bound), taken, left, places)
    rest = sorted(oldest + bound for prompt_id, _, oldest in groups if prompt_id not in taken)
    slots = [version] * left + [version + 1 + place // places for place in range(len(rest))]
    in_time = all(slot <= due for slot, due in zip(slots, rest, strict=False))
    if in_time or all(done for _, done, _ in groups):
        assert blockers == ()
    if blockers:
        assert not in_time
        assert all(not groups[[one[0] for one in groups].index(prompt_id)][1] for prompt_id in blockers)
