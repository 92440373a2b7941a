# SPDX-License-Identifier: Apache-2.0
"""The restart of workers on request, whether they live or not, in their slots or in others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._membership.model import Snapshot
from .._membership.operations import Facilities, Plan
from ..exceptions import BrokenEpochError


@dataclass(frozen=True)
class RestartRanks:
    """Restart ranks of a group; see `RayWorkerGroup.restart`."""

    ranks: tuple[int, ...]
    elsewhere: bool  # whether in other slots

    @property
    def name(self) -> str:
        """The description for errors."""
        return f"The restart of rank(s) {', '.join(map(str, self.ranks))}"

    def plan(self, now: Snapshot, ask: Facilities) -> Plan:
        """Return the restart; with scope "group" the other ranks are restarted too, where they are."""
        check_members(self.ranks, now)
        if now.is_broken:
            raise BrokenEpochError(tuple(now.lost.values()), epoch=now.epoch)
        lost, everybody = ask.find_lost(), ask.policy.restarts_all
        started = tuple(range(len(now.members))) if everybody else self.ranks
        return Plan(
            self.name,
            now.sharding,
            replace=started,
            move=self.ranks if self.elsewhere else (),
            quiet=tuple(rank for rank in self.ranks if rank not in lost),
            new_port=everybody,
            on_restart=started,
        )


def check_ranks(ranks: object) -> tuple[int, ...]:
    """Return the ranks that a user has given, in ascending order, or refuse them."""
    given = None if isinstance(ranks, str) or not isinstance(ranks, Iterable) else list(ranks)
    if given is None or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in given):
        raise TypeError(f"restart takes a list of ranks such as [3], got {ranks!r}")
    if not given or len(set(given)) != len(given):
        raise ValueError(f"restart takes at least one rank, and each rank once, got {given}")
    return tuple(sorted(given))


def check_members(ranks: Sequence[int], now: Snapshot) -> None:
    """Refuse ranks that the group does not have."""
    if wrong := [rank for rank in ranks if not 0 <= rank < len(now.members)]:
        raise IndexError(f"rank {wrong[0]} is out of range: the group has ranks 0 to {len(now.members) - 1}")
