# SPDX-License-Identifier: Apache-2.0
"""The operations that change who is in a group, as plans of one kind. They change nothing themselves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairlead_placement import Slot
from fairlead_sharding import NamedSharding

from .._model import GroupState
from .._world import Deadline
from ..exceptions import WorkerFailure, WorkerFailureError
from .core import CLUSTER_GONE, Core
from .losses import CAUSE_S, find_lost


@dataclass(frozen=True)
class Plan:
    """What one change does; the same steps carry out all of them."""

    sharding: NamedSharding  # of the next epoch
    new: tuple[int, ...] = ()  # ranks without a living process, which start while calls go on
    # Ranks whose old process ends before the constructor of the new one runs; calls wait from the beginning.
    replaced: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()  # the replaced ranks that start in other slots
    slots: Sequence[Slot] | None = None  # of ranks that the group has not had; None for free ones of the cluster
    counts: bool = False  # whether it counts as a restart of the ranks that it starts again
    quiet: tuple[int, ...] = ()  # living ranks whose calls have to end first
    follows: bool = False  # whether every survivor has to take part: then a late one breaks the group
    again: bool = False  # whether this is the first part, after which the operation is planned again


@dataclass(frozen=True)
class Operation:
    """One way to change who is in a group: its name for errors, and what returns its plan, or None for no change."""

    name: str
    plan: Callable[[GroupState, Core, Deadline], Plan | None]


def start() -> Operation:
    return Operation(
        "The start",
        lambda now, core, until: Plan(now.sharding, new=tuple(range(len(now.members)))),
    )


def restart_lost() -> Operation:
    """Return the restart of lost workers: the same ranks in their slots, or in other slots if a node is lost."""

    def plan(now: GroupState, core: Core, until: Deadline) -> Plan | None:
        lost = _find_lost(now, core, until)
        return _plan_restart(now, lost, core) if lost else None

    return Operation("The restart", plan)


def restart_ranks(ranks: tuple[int, ...], *, elsewhere: bool) -> Operation:
    """Return the restart of ranks whose workers may live; with scope "group" the others restart where they are."""
    name = f"The restart of rank(s) {', '.join(map(str, ranks))}"

    def plan(now: GroupState, core: Core, until: Deadline) -> Plan:
        check_members(ranks, now)
        if now.phase == "broken":
            raise core.failure_error(list(now.lost.values()))
        lost, everybody = _find_lost(now, core, until), core.restarts_all
        started = tuple(range(len(now.members))) if everybody else ranks
        return Plan(
            now.sharding,
            replaced=started,
            moved=ranks if elsewhere else (),
            quiet=tuple(rank for rank in ranks if rank not in lost),
        )

    return Operation(name, plan)


def resize(axis: str, size: int, slots: Sequence[Slot] | None) -> Operation:
    """Return the change of the size of an axis; lost workers that stay are started again."""
    name = f"The resize to {axis}={size}"

    def plan(now: GroupState, core: Core, until: Deadline) -> Plan | None:
        sharding = check_resize(now, {axis: size}, slots)
        before, members = now.sharding.get_axis_size(axis), range(len(now.members))
        lost = _find_lost(now, core, until)
        stay = tuple(rank for rank in lost if rank < sharding.size)
        if stay and (before == size or core.restarts_all):
            # As `restart_failed_workers` would: with scope "group" together with all others.
            return replace(_plan_restart(now, lost, core), again=before != size)
        if before == size:
            return None
        if reason := core.explain_limit(stay) if stay else "":
            raise WorkerFailureError(tuple(lost[rank] for rank in stay), reason)
        return Plan(
            sharding,
            new=(*stay, *range(len(members), sharding.size)),
            slots=slots,
            counts=bool(stay),
            quiet=tuple(rank for rank in members[: sharding.size] if rank not in lost),
            follows=True,
        )

    return Operation(name, plan)


def _plan_restart(now: GroupState, lost: Mapping[int, WorkerFailure], core: Core) -> Plan:
    """Return the restart of lost ranks, or of all of them with scope "group"."""
    everybody = tuple(range(len(now.members)))
    # Ray would create actors on a removed placement group without an error, and never start them.
    is_gone = any(loss.kind == "shut-down" for loss in lost.values())
    if reason := CLUSTER_GONE if is_gone else core.explain_limit(lost):
        raise WorkerFailureError(tuple(lost.values()), reason)
    ranks = everybody if core.restarts_all else tuple(lost)
    return Plan(now.sharding, replaced=ranks, counts=True, follows=now.phase == "broken")


def _find_lost(now: GroupState, core: Core, until: Deadline) -> dict[int, WorkerFailure]:
    """Return the workers that are dead now, by rank, including those that no call has met."""
    core.note(find_lost(core, now.members, until.left(at_most=CAUSE_S) or 0.0).items())
    return dict(core.now.lost)


def check_resize(now: GroupState, sizes: Mapping[str, int], slots: Sequence[Slot] | None) -> NamedSharding:
    """Return the axes of another size of the group, or refuse it."""
    axis, size = _check_sizes(now.sharding, sizes)
    before = now.sharding.get_axis_size(axis)
    each = now.sharding.size // before
    if any(len(place.tied_bundles[1]) > 1 for place in now.places):
        raise ValueError("a group of tied workers, which share one model copy, cannot be resized: start a new group")
    if slots is not None and not (isinstance(slots, Sequence) and all(isinstance(slot, Slot) for slot in slots)):
        raise TypeError(f"slots must be a sequence of slots, such as cluster.slots()[4:], got {slots!r}")
    if slots is not None and len(slots) != max(0, each * (size - before)):
        raise ValueError(
            f"a resize from {axis}={before} to {axis}={size} needs {max(0, each * (size - before))} slot(s), got "
            f"{len(slots)}"
        )
    layout = np.arange(each * size).reshape(list({**now.sharding.shape, axis: size}.values()))
    return NamedSharding(layout, now.sharding.names)


def check_ranks(ranks: object) -> tuple[int, ...]:
    """Return the ranks that a user has given, in ascending order, or refuse them."""
    given = None if isinstance(ranks, str) or not isinstance(ranks, Iterable) else list(ranks)
    if given is None or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in given):
        raise TypeError(f"restart takes a list of ranks such as [3], got {ranks!r}")
    if not given or len(set(given)) != len(given):
        raise ValueError(f"restart takes at least one rank, and each rank once, got {given}")
    return tuple(sorted(given))


def check_members(ranks: Sequence[int], now: GroupState) -> None:
    if wrong := [rank for rank in ranks if not 0 <= rank < len(now.members)]:
        raise IndexError(f"rank {wrong[0]} is out of range: the group has ranks 0 to {len(now.members) - 1}")


def _check_sizes(sharding: NamedSharding, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the axis and the size that a resize requests."""
    if len(sizes) != 1:
        raise ValueError(f"resize takes one axis with its new size, such as dp=6, got {dict(sizes)}")
    ((axis, size),) = sizes.items()
    sharding.get_axis_index(axis)
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"the size of an axis must be a whole number, got {axis}={size!r}")
    if size < 1:
        raise ValueError(f"the size of an axis must be at least 1, got {axis}={size}")
    if (sharding.layout.ravel() != np.arange(sharding.size)).any():
        raise ValueError(
            f"the ranks of {sharding!r} are not in the order of its coordinates, the slowest-varying axis first, so it "
            "cannot be resized: ranks would have to move. Use a mesh such as NamedSharding.from_shape(dp=2, tp=4)."
        )
    if axis != (elastic := sharding.names[0]):
        raise ValueError(
            f"this group can be resized along {elastic!r} only, its slowest-varying axis: along {axis!r} the ranks of "
            "other workers would change. Start a new group for that."
        )
    return axis, size
