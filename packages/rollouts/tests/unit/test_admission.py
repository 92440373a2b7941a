# SPDX-License-Identifier: Apache-2.0
"""When a claim has to wait for groups that are not finished."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_rollouts import LedgerConfig
from fairlead_rollouts._transitions import find_blockers


def blockers(groups, *, version, bound, left, places):
    """Return what blocks a claim that leaves these groups behind: prompt id, finished, oldest version."""
    records = [
        SimpleNamespace(prompt_id=prompt_id, state="finished" if finished else "leased", oldest=oldest)
        for prompt_id, finished, oldest in groups
    ]
    config = LedgerConfig(group_size=1, groups_per_version=places, max_staleness=bound)
    return find_blockers(records, config, version=version, left=left)


@pytest.mark.parametrize(
    ("groups", "left", "expected"),
    [
        # Due in version 5, with and without a place left.
        ([(1, False, 4)], 0, (1,)),
        ([(1, False, 4)], 1, ()),
        # Due in version 6, where two places are left.
        ([(1, False, 5), (2, False, 5)], 0, ()),
        ([(1, False, 5), (2, False, 5), (3, False, 5)], 0, (1, 2, 3)),
        # Too many are due, but all of them are finished: waiting does not help.
        ([(1, True, 4), (2, True, 4)], 0, ()),
        # It is too late for an unfinished group of version 3, so it counts no more.
        ([(1, False, 3)], 0, ()),
    ],
)
def test_blockers(groups, left, expected):
    """A claim waits for unfinished groups that could not be trained in time after it."""
    assert blockers(groups, version=5, bound=1, left=left, places=2) == expected


@given(
    groups=st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=12),
    places=st.integers(1, 4),
    data=st.data(),
)
def test_a_claim_without_blockers_can_be_scheduled(groups, places, data):
    """If nothing blocks a claim, and the rest can be finished, a schedule by deadline trains every group in time."""
    bound, version, left = 2, 3, data.draw(st.integers(0, places))
    groups = [(prompt_id, finished, oldest) for prompt_id, (finished, oldest) in enumerate(groups)]
    blocked_by = blockers(groups, version=version, bound=bound, left=left, places=places)
    due = sorted(oldest + bound for _, _, oldest in groups)
    slots = [version] * left + [version + 1 + place // places for place in range(len(groups))]
    in_time = all(slot <= last for slot, last in zip(slots, due, strict=False))
    unfinished = {prompt_id for prompt_id, finished, _ in groups if not finished}
    assert set(blocked_by) <= unfinished
    assert not (in_time and blocked_by)
    assert in_time or blocked_by or len(unfinished) < len(groups), "waiting would help"
