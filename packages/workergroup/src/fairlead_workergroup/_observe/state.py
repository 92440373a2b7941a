# SPDX-License-Identifier: Apache-2.0
"""The state of a group as a value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .calls import GroupStatistics


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """The state of a group at the time of `RayWorkerGroup.inspect`.

    Attributes:
        epoch: the number of changes of membership so far: restarts, resizes and replacements. Every call runs in one
            epoch: no worker sees it with the facts of another one.
        standby: the number of standbys that are ready.
        standby_metadata: a dict for each standby: its place, and whether it is "warm" or "starting".
        statistics: the counts of what has been stored and sent so far.
        shown: what packages show of the group, by the key that each has chosen, such as the versions of a link.
    """

    epoch: int
    standby: int
    standby_metadata: list[dict[str, Any]]
    statistics: GroupStatistics
    shown: Mapping[str, Any]
