# SPDX-License-Identifier: Apache-2.0
"""The resize of a group: new members start completely, then all members get the facts of the new epoch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding

from .._membership.model import Resize as Resized
from .._membership.model import Snapshot
from .._membership.operations import Facilities, Plan, plan_restart
from ..exceptions import WorkerFailureError, WorkerGroupError
from .axis import check_sizes, check_tied_groups, resize_mesh


@dataclass(frozen=True)
class Resize:
    """Change the size of a group along its slowest-varying axis; see `RayWorkerGroup.resize`."""

    axis: str
    size: int
    slots: Sequence[Slot] | None  # of the new ranks; None for free ones of the cluster
    elastic: str | None  # the slowest-varying axis of the mesh that the group was made with

    @property
    def name(self) -> str:
        """The description for errors."""
        return f"The resize to {self.axis}={self.size}"

    def plan(self, now: Snapshot, ask: Facilities) -> Plan | None:
        """Return the resize, or the restart of lost ranks that comes before it."""
        sharding = check_resize(now, self.elastic, {self.axis: self.size}, self.slots)
        before, size = now.sharding.get_axis_size(self.axis), sharding.size
        lost = ask.find_lost()
        stays = [rank for rank in lost if rank < size]
        if stays and (before == self.size or ask.policy.restarts_all):
            # As `restart_failed_workers` would: with scope "group" together with all others.
            return replace(plan_restart(self.name, now, lost, ask), again=before != self.size)
        if before == self.size:
            return None
        if reason := ask.policy.explain_limit(now, stays) if stays else "":
            raise WorkerFailureError(tuple(lost[rank] for rank in stays), reason)
        return Plan(
            self.name,
            sharding,
            start=(*stays, *range(len(now.members), size)),
            leave=tuple(range(size, len(now.members))),
            slots=self.slots,
            counted=frozenset(stays),
            quiet=tuple(rank for rank in range(min(size, len(now.members))) if rank not in lost),
            follow=True,
            new_port=True,
            on_restart=tuple(stays),
            resize=Resized(now.epoch + 1, self.axis, before, self.size),
        )


def check_resize(
    now: Snapshot, elastic: str | None, sizes: Mapping[str, int], slots: Sequence[Slot] | None
) -> NamedSharding:
    """Return the axes of another size of the group, or refuse it."""
    axis, size = check_sizes(now.sharding, elastic, sizes)
    before = now.sharding.get_axis_size(axis)
    each = now.sharding.size // before
    check_tied_groups(now.places, each, each * size)
    if slots is not None and not (isinstance(slots, Sequence) and all(isinstance(slot, Slot) for slot in slots)):
        raise TypeError(f"slots must be a sequence of slots, such as cluster.slots()[4:], got {slots!r}")
    if slots is not None and len(slots) != max(0, each * (size - before)):
        raise ValueError(
            f"a resize from {axis}={before} to {axis}={size} needs {max(0, each * (size - before))} slots, got "
            f"{len(slots)}"
        )
    return resize_mesh(now.sharding, axis, size)


def check_caller(token: str) -> None:
    """Refuse a resize from inside a worker of the group, which could not take part in it."""
    facts = getattr(sys.modules.get("_fairlead_worker"), "facts", {})
    if facts.get("tree", "").startswith(f"{token}-"):
        raise WorkerGroupError(
            "A worker cannot resize its own group, because it has to take part in that between two of its calls. "
            "Return the wish to the driver, and call resize there."
        )
