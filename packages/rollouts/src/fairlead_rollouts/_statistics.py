# SPDX-License-Identifier: Apache-2.0
"""The counters of a ledger, and their frozen copy."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Counters", "Statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Describe the state of a ledger in numbers.

    The groups in each state are counted over all runs of the job, and everything else since this ledger was made.

    Attributes:
        version: the trainer's version.
        pending, leased, finished, claimed, trained, applied, dropped: the groups in each state.
        room: the groups that may be leased now.
        oldest_open: the age in versions of the oldest open group, or None.
        drops: dropped groups by reason.
        staleness: claimed groups by staleness, in versions.
        requeued: groups that became too old and were requeued, by the attempt that was lost.
        regenerated: finished samples that were released because they have to be generated again.
        fenced: late results that were refused.
        waits: claims that had to wait for older groups.
        blocked_by: the groups that the last of these claims waited for.

    >>> ledger = Ledger(LedgerConfig(group_size=1, groups_per_version=4, max_staleness=0), ["a", "b"])
    >>> leases = ledger.lease(2)
    >>> ledger.statistics().leased, ledger.statistics().room
    (2, 2)
    """

    version: int
    pending: int
    leased: int
    finished: int
    claimed: int
    trained: int
    applied: int
    dropped: int
    room: int
    oldest_open: int | None
    drops: Mapping[str, int]
    staleness: Mapping[int, int]
    requeued: Mapping[int, int]
    regenerated: int
    fenced: int
    waits: int
    blocked_by: tuple[int, ...]


@dataclass
class Counters:
    """The part of `Statistics` that is counted as it happens."""

    drops: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    requeued: Counter[int] = field(default_factory=Counter)
    regenerated: int = 0
    fenced: int = 0
    waits: int = 0
    blocked_by: tuple[int, ...] = ()
