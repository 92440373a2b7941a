# SPDX-License-Identifier: Apache-2.0
"""The state of a group as a value."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """The state of a group at the time of `RayWorkerGroup.inspect`.

    Attributes:
        epoch: the number of changes of membership so far: restarts and resizes. Every call runs in one
            epoch: no worker sees it with the facts of another one.
    """

    epoch: int
