# SPDX-License-Identifier: Apache-2.0
"""Matches nodes to requests that share no node."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise


def match(needs: Sequence[int], profiles: Mapping[tuple[int, ...], int]) -> list[Counter[tuple[int, ...]]] | None:
    """Assign nodes to wants so that no two wants share a node: bipartite matching between kinds.

    Each want, the most demanding first, `needs` so many nodes. A profile is the worth of a node to each want, or 0.
    Return the number of nodes of each profile for each want, from those worth least to it, or None if it is impossible.
    """
    # A want may take the only nodes that another can use, and then has to take others: the matching follows shortest
    # augmenting paths.
    unused = dict(profiles)
    usable = [sorted((p for p in profiles if p[want]), key=lambda p: p[want]) for want in range(len(needs))]
    tightest = [nodes[::-1] for nodes in usable]
    given: list[Counter[tuple[int, ...]]] = [Counter() for _ in needs]
    holders: dict[tuple[int, ...], set[int]] = {profile: set() for profile in profiles}
    for want, need in enumerate(needs):
        while need:
            # Which want would have to give a node of which profile to which other, until one can take an unused node.
            reached: dict[int, tuple[int, tuple[int, ...]] | None] = {want: None}
            queue = deque([want])
            while queue:
                last = queue.popleft()
                while tightest[last] and not unused[tightest[last][-1]]:
                    tightest[last].pop()  # assigned nodes may change their want, but stay assigned
                if tightest[last]:
                    break
                for profile in usable[last]:
                    for other in holders[profile].difference(reached):
                        reached[other] = (last, profile)
                        queue.append(other)
            else:
                return None
            end = tightest[last][-1]
            # Who takes nodes of which profile: the first of them unused ones, each other one from the one before it.
            path = [(last, end)]
            while (step := reached[path[-1][0]]) is not None:
                path.append(step)
            moves = [(giver, profile) for (giver, _), (_, profile) in pairwise(path)]
            amount = min(need, unused[end], *(given[giver][profile] for giver, profile in moves))
            need -= amount
            unused[end] -= amount
            for giver, profile in moves:
                given[giver][profile] -= amount
                if not given[giver][profile]:
                    holders[profile].discard(giver)
            for taker, profile in path:
                given[taker][profile] += amount
                holders[profile].add(taker)
    return given
