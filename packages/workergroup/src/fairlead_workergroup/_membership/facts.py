# SPDX-License-Identifier: Apache-2.0
"""The facts of a worker about itself: one frozen value for each rank and epoch. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerFacts:
    """The facts about one rank in one epoch."""

    rank: int
    epoch: int
    incarnation: int  # how often the rank has been started again
    world_size: int
    name: str
    coords: Mapping[str, int]
    env: Mapping[str, str]  # the variables that describe a rank, such as LOCAL_RANK, MASTER_ADDR and MASTER_PORT

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as the worker publishes them."""
        return {**vars(self), "coords": dict(self.coords), "env": dict(self.env)}

    def since(self, before: "WorkerFacts") -> dict[str, Any]:
        """Return what differs from the facts that a worker holds.

        >>> old = WorkerFacts(0, 1, 0, 2, "a", {}, {"LOCAL_RANK": "1"})
        >>> WorkerFacts(0, 2, 0, 2, "a", {}, {"LOCAL_RANK": "0"}).since(old)
        {'epoch': 2, 'env': {'LOCAL_RANK': '0'}}
        """
        changed = {name: value for name, value in self.to_dict().items() if value != getattr(before, name)}
        if "env" in changed:
            changed["env"] = {name: value for name, value in self.env.items() if before.env.get(name) != value}
        return changed
