# SPDX-License-Identifier: Apache-2.0
"""The state of a group as a value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """The state of a group at the time of `RayWorkerGroup.inspect`.

    Attributes:
        epoch: the number of changes of membership so far: restarts and resizes. Every call runs in one
            epoch: no worker sees it with the facts of another one.
        shown: what packages show of the group, by the key that each has chosen, such as the versions of a link.
    """

    epoch: int
    shown: Mapping[str, Any]
