# SPDX-License-Identifier: Apache-2.0
"""How many groups may be open, and whether the groups that a claim leaves behind can still be trained in time."""

import sys
from collections.abc import Collection

from ._policies import View

__all__ = ["find_blockers", "room_for"]


def room_for(
    *,
    lookahead: int | None,
    serving_lag: int,
    groups_per_version: int,
    leased: int,
    finished: int,
    ahead: int,
    max_leased: int | None = None,
    max_open: int | None = None,
) -> int:
    """Return how many more groups may be leased, counted from live records only.

    With `lookahead` equal to the bound K, a group that is leased now and trained oldest first is trained at most K
    versions after its weights.

    Args:
        lookahead: versions that leases may run ahead of the trainer; None for no gate.
        serving_lag: versions by which generators may lag behind the trainer.
        groups_per_version: groups that are trained between two updates of the weights.
        leased: groups in generation, and pending groups that hold samples.
        finished: finished groups that no step has claimed.
        ahead: groups claimed for the current version or a later one.
        max_leased: the most groups in generation; None for no limit.
        max_open: the most groups leased or finished; None for no limit.

    Returns:
        The number of groups, never below 0; `sys.maxsize` without any limit.

    >>> room_for(lookahead=1, serving_lag=0, groups_per_version=4, leased=3, finished=2, ahead=0)
    3
    """
    room = sys.maxsize
    if max_leased is not None:
        room = min(room, max_leased - leased)
    if max_open is not None:
        room = min(room, max_open - leased - finished)
    if lookahead is not None:
        room = min(room, (lookahead + 1 - serving_lag) * groups_per_version - (leased + finished + ahead))
    return max(0, room)


def find_blockers(view: View, taken: Collection[int], left: int, groups_per_version: int) -> tuple[int, ...]:
    """Return the unfinished groups that must end before a claim, so that no group misses its deadline.

    A group must be trained at its oldest version plus K. After the claim, `left` places remain in the version of the
    view and `groups_per_version` in each later one. If more groups are due by some version than there are places up to
    it, the unfinished groups among them block the claim. If none of them is unfinished, waiting does not help, and the
    claim is not blocked.
    """
    bound = view.max_staleness
    assert bound is not None
    # How many versions after the claim's version a group may be trained at the latest.
    slack = {group.prompt_id: group.oldest_version + bound - view.version for group in view.groups}
    taken = set(taken)
    due = [0] * (bound + 1)
    for prompt_id, versions in slack.items():
        if 0 <= versions <= bound and prompt_id not in taken:
            due[versions] += 1
    total = 0
    for later, count in enumerate(due):
        total += count
        if total > left + later * groups_per_version:
            found = [
                group.prompt_id for group in view.groups if not group.ready and 0 <= slack[group.prompt_id] <= later
            ]
            if found:
                return tuple(sorted(found))
    return ()
