# SPDX-License-Identifier: Apache-2.0
"""Nodes of its own for every want: bipartite matching between kinds of wants and kinds of nodes."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

__all__ = ["match"]


def match(needs: Sequence[int], profiles: Mapping[tuple[int, ...], int]) -> list[Counter[tuple[int, ...]]] | None:
    """Give each want nodes of its own.

    Args:
        needs: how many nodes each want needs; the most demanding first.
        profiles: how many nodes there are of each profile: what such a node is worth to each want, 0 for nothing.

    Returns:
        How many nodes of each profile each want gets, from those worth least to it; None only if there is no way.

    A want may take the only nodes that another can use. It then moves on. (This is bipartite matching by shortest
    augmenting paths, between kinds instead of single wants and nodes.)
    """
    unused = dict(profiles)
    usable = [sorted((p for p in profiles if p[want]), key=lambda p: p[want]) for want in range(len(needs))]
    tightest = [nodes[::-1] for nodes in usable]
    given: list[Counter[tuple[int, ...]]] = [Counter() for _ in needs]
    holders: dict[tuple[int, ...], set[int]] = {profile: set() for profile in profiles}
    for want, need in enumerate(needs):
        while need:
            # Who would have to give a node of which profile to whom, until somebody finds an unused one.
            reached: dict[int, tuple[int, tuple[int, ...]] | None] = {want: None}
            queue = deque([want])
            while queue:
                last = queue.popleft()
                while tightest[last] and not unused[tightest[last][-1]]:
                    tightest[last].pop()  # nodes that are given may change hands, but stay given
                if tightest[last]:
                    break
                for profile in usable[last]:
                    for other in holders[profile].difference(reached):
                        reached[other] = (last, profile)
                        queue.append(other)
            else:
                return None
            end = tightest[last][-1]
            amount = min(need, unused[end])
            step = reached[last]
            giver = last
            while step is not None:
                amount = min(amount, given[giver][step[1]])
                giver, step = step[0], reached[step[0]]
            unused[end] -= amount
            taken, taker = end, last
            while True:
                given[taker][taken] += amount
                holders[taken].add(taker)
                step = reached[taker]
                if step is None:
                    break
                given[taker][step[1]] -= amount
                if not given[taker][step[1]]:
                    holders[step[1]].discard(taker)
                taker, taken = step
            need -= amount
    return given
