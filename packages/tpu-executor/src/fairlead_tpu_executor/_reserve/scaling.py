# SPDX-License-Identifier: Apache-2.0
"""How many slices to have, and which: decided from what is held and what is free."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fairlead_placement.spi import Waiting, read_nodes

from .._accelerators.config import AcceleratorConfigType
from .._accelerators.slices import SliceInfo, SliceLack
from .._health import Head
from ..exceptions import InsufficientSlicesError
from .leases import Demand, Lease, fits, give_back, take

__all__ = ["Choice", "Patience", "Survey", "choose_size", "patience", "scale", "survey"]

_POLL_S = (0.05, 1.0)
# Seconds after the timeout in which another driver may still take a free slice first.
_RACES_S = 5.0


@dataclass(frozen=True)
class Survey:
    """The slices that are free, and why the others are not.

    Attributes:
        free: whole slices that can be taken now.
        lacking: the others that are seen, and what each lacks.
    """

    free: tuple[SliceInfo, ...]
    lacking: tuple[SliceLack, ...]


def survey(config: AcceleratorConfigType, held: Collection[SliceInfo], quarantined: Collection[str]) -> Survey:
    """Look at the nodes once.

    Args:
        config: what is wanted.
        held: slices that are held already; they are neither free nor lacking.
        quarantined: ids of nodes not to use.
    """
    nodes = {node.node_id: node for node in read_nodes()}
    names = {one.slice_name for one in held}
    found = config.find(list(nodes.values()), quarantined)
    free: list[SliceInfo] = []
    lacking = [lack for lack in found.lacking if lack.slice_name not in names]
    for one in found.intact:
        if one in held:
            continue
        bad = [worker for worker, node_id in enumerate(one.node_ids) if node_id in quarantined]
        if bad:
            said = f"worker {', '.join(map(str, bad))} did not answer, or its accelerators did not start, a while ago"
        else:
            said = fits(config, one, nodes)
        if said:
            lacking.append(SliceLack(one.slice_name, said))
        else:
            free.append(one)
    return Survey(tuple(free), tuple(lacking))


@dataclass(frozen=True)
class Choice:
    """What to do now: have `size` slices, or wait (None)."""

    size: int | None


def choose_size(sizes: Sequence[int], held: int, free: int, *, waited_out: bool) -> Choice:
    """The largest allowed number of slices at once; a smaller one only when the wait is over. Pure.

    Args:
        sizes: what is allowed, ascending.
        held: how many are held.
        free: how many more are free now.
        waited_out: whether the scale timeout has ended.

    >>> choose_size([1, 2], held=0, free=1, waited_out=False), choose_size([1, 2], held=0, free=1, waited_out=True)
    (Choice(size=None), Choice(size=1))
    """
    possible = [size for size in sizes if size <= held + free]
    if possible and (possible[-1] == sizes[-1] or waited_out):
        return Choice(possible[-1])
    return Choice(None)


@dataclass(frozen=True)
class Patience:
    """How long to wait for slices.

    Attributes:
        largest_s: seconds to wait for the largest allowed number. Then a smaller one will do.
        any_s: seconds to wait for any allowed number. Then there are too few.
    """

    largest_s: float
    any_s: float


def patience(sizes: Sequence[int], held: int, lost: int, *, scale_s: float, replace_s: float) -> Patience:
    """Return how long to wait for slices. Pure.

    A pool that has waited before, and continued with fewer, does not wait again while these are healthy: it only takes
    more if they are free. A pool that has lost slices waits longer, because its job has made progress.

    Args:
        sizes: the allowed numbers.
        held: how many healthy slices are held.
        lost: how many have just been lost.
        scale_s: seconds to wait for the first slices.
        replace_s: seconds to wait for a replacement.

    >>> patience([1, 2], held=1, lost=0, scale_s=600, replace_s=86400)
    Patience(largest_s=0.0, any_s=0.0)
    >>> patience([1, 2], held=0, lost=2, scale_s=600, replace_s=86400)
    Patience(largest_s=600, any_s=86400)
    """
    if lost:
        return Patience(min(scale_s, replace_s), replace_s)
    waiting = 0.0 if held in sizes else scale_s
    return Patience(waiting, waiting)


def scale(
    config: AcceleratorConfigType,
    sizes: Sequence[int],
    held: Sequence[Lease],
    head: Head,
    *,
    limits: Patience,
    quarantined: Callable[[], Collection[str]],
    keep: Callable[[Sequence[Lease]], None],
    go_on: Callable[[], None],
) -> list[Lease]:
    """Have as many slices as allowed, keeping those that are held.

    While waiting nothing more is taken: two jobs that each hold a part of what both want would wait for ever.

    Args:
        config: what is wanted.
        sizes: the allowed numbers, ascending.
        held: healthy slices.
        head: tells what is free.
        limits: how long to wait.
        quarantined: ids of nodes not to use now.
        keep: called with what is held, before anything else can go wrong.
        go_on: called before each look; raises when nobody wants the slices any more.

    Raises:
        InsufficientSlicesError: not even the smallest number was free. What was held is still held.
        HeadUnreachableError: the head did not answer in time. What was held is still held.
    """
    began = time.monotonic()
    pause = _POLL_S[0]
    leases = list(held)
    with Waiting(f"Waiting for {sizes[-1]} x {config.kind}") as waiting, Demand(config, head) as demand:
        while True:
            go_on()
            now = head.ask(survey, config, [lease.slice for lease in leases], quarantined())
            waited = time.monotonic() - began
            size = choose_size(sizes, len(leases), len(now.free), waited_out=waited >= limits.largest_s).size
            if size is not None:
                demand.withdraw()
                # Somebody may be faster; then look again.
                wanted = now.free[: max(0, size - len(leases))]
                taken = head.ask(take, config, wanted, undo=_give_back_late) if wanted else []
                if taken is not None:
                    leases, extra = [*leases[:size], *taken], leases[size:]
                    keep([*leases, *extra])
                    if extra:
                        head.ask(give_back, extra)
                    keep(leases)
                    return leases
            if waited >= limits.any_s + (0 if size is None else _RACES_S):
                raise InsufficientSlicesError(
                    config.kind, tuple(sizes), len(leases) + len(now.free), now.lacking, waited
                )
            demand.show(sizes[-1] - len(leases) - len(now.free))
            there = f"{len(leases)} held, {len(now.free)} free"
            waiting.show("; ".join([there, *map(str, now.lacking[:2])]), limits.any_s)
            nearest = limits.largest_s if waited < limits.largest_s else limits.any_s
            time.sleep(max(0.01, min(pause, began + nearest - time.monotonic())))
            pause = min(2 * pause, _POLL_S[1])


def _give_back_late(taken: Sequence[Lease] | None) -> None:
    """Return slices that were taken after everybody had stopped waiting for them."""
    give_back(taken or ())
