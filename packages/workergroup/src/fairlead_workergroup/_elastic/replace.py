# SPDX-License-Identifier: Apache-2.0
"""The replacement of workers: their ranks move to new processes in other slots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._membership.model import Snapshot
from .._membership.operations import Facilities, Plan
from ..exceptions import BrokenEpochError


@dataclass(frozen=True)
class Replace:
    """Move ranks of a group to other processes; see `RayWorkerGroup.replace`."""

    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """The description for errors."""
        return f"The replacement of rank(s) {', '.join(map(str, self.ranks))}"

    def plan(self, now: Snapshot, ask: Facilities) -> Plan:
        """Return the replacement; with scope "group" the other ranks are restarted where they are."""
        check_members(self.ranks, now)
        ask.check_alike()
        if now.is_broken:
            raise BrokenEpochError(tuple(now.lost.values()), epoch=now.epoch)
        lost, everybody = ask.find_lost(), ask.policy.restarts_all
        started = tuple(range(len(now.members))) if everybody else self.ranks
        return Plan(
            self.name,
            now.sharding,
            replace=started,
            move=self.ranks,
            quiet=tuple(rank for rank in self.ranks if rank not in lost),
            new_port=everybody,
            on_restart=started,
        )


def check_ranks(ranks: object) -> tuple[int, ...]:
    """Return the ranks that a user has given, in ascending order, or refuse them."""
    given = None if isinstance(ranks, str) or not isinstance(ranks, Iterable) else list(ranks)
    if given is None or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in given):
        raise TypeError(f"replace takes a list of ranks such as [3], got {ranks!r}")
    if not given or len(set(given)) != len(given):
        raise ValueError(f"replace takes at least one rank, and each rank once, got {given}")
    return tuple(sorted(given))


def check_members(ranks: Sequence[int], now: Snapshot) -> None:
    """Refuse ranks that the group does not have."""
    if wrong := [rank for rank in ranks if not 0 <= rank < len(now.members)]:
        raise IndexError(f"rank {wrong[0]} is out of range: the group has ranks 0 to {len(now.members) - 1}")
