# SPDX-License-Identifier: Apache-2.0
"""Holds the state of a cluster: its reservation and everything that was taken on it, and releases it together."""

import contextlib
import functools
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from ray.util.placement_group import PlacementGroup

from .._model import Ask, Node, Request, group_pairs
from .._nodes.head import alive_nodes, head_deadline
from .._nodes.ports import PortLease, describe_lost, lease_ports, release_ports
from .._nodes.usage import read_usage, unwatch
from .._plan.topology import node_place
from .._ray_private import connection
from .._slot import Slot
from ..exceptions import PlacementError, PlacementTimeoutError
from .claims import close_slots
from .groups import is_moved_by_ray, read_placed, remove, remove_on_error
from .slots import number_slots, slots_of
from .wait import reserve

logger = logging.getLogger(__name__)
# Seconds in which Ray has to have the resources back.
GIVE_BACK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Held:
    """The resources of a cluster between its reservation and its shutdown. Each change makes another one."""

    on: object  # the connection to Ray
    # Those of the first reservation in physical order, then those of each extension.
    slots: tuple[Slot, ...]
    # One dictionary for the whole reservation. Any thread adds to it, by single operations.
    leases: dict[PortLease, None] = field(default_factory=dict)
    watcher: str | None = None  # for which the agents of the nodes sample memory

    @property
    def node_ids(self) -> list[str]:
        """The ids of the physical nodes, in the order of the slots."""
        return list(dict.fromkeys(slot.node_id for slot in self.slots))

    @property
    def ray_ended(self) -> bool:
        """Whether this process is no longer connected to the Ray on which it was reserved."""
        return self.on != connection()

    def groups_of(self, slots: Iterable[Slot]) -> list[PlacementGroup]:
        """Return the placement groups of slots, in the order of the logical nodes."""
        ordered = sorted(slots, key=lambda slot: slot.node_idx)
        return list({slot.placement_group.id: slot.placement_group for slot in ordered}.values())


@dataclass(eq=False)
class Holding:
    """The request and the resources of a virtual cluster, both of them values that one thread at a time replaces.

    The finalizer of the cluster refers to it, so it does not refer to the cluster.
    """

    request: Request
    monitor_memory: bool = False
    held: Held | None = None
    is_adopted: bool = False  # whether others own what is held
    # Reentrant: a signal handler may shut the cluster down.
    _changing: Any = field(default_factory=threading.RLock)
    _changer: int = 0  # the thread that has it
    _shutdowns: int = 0  # whatever began before the latest of them ends without a result

    @contextlib.contextmanager
    def _change(self, timeout_s: float, advice: str = ", or wait longer (timeout_s)") -> Iterator[Callable[[], None]]:
        """Keep other threads from changing what is held; yield a function that raises if a shutdown has begun since."""
        check, began = functools.partial(self._check, self._shutdowns), time.monotonic()
        if not self._changing.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise PlacementTimeoutError(
                f"Waited {timeout_s:.1f} s: another thread still changes the cluster {self.request.name!r}. Try again "
                f"when that has ended{advice}."
            )
        outer, self._changer = self._changer, threading.get_ident()
        try:
            with head_deadline(max(0.0, began + timeout_s - time.monotonic())):
                yield check
        finally:
            self._changer = outer
            self._changing.release()

    def _check(self, shutdowns: int) -> None:
        """Raise if a shutdown has begun since there were so many."""
        if self._shutdowns != shutdowns:
            raise PlacementError(
                f"The cluster {self.request.name!r} was shut down in the meantime, and holds nothing: "
                "reserve the cluster and try again."
            )

    def _held_now(self, check: Callable[[], None]) -> Held:
        """Return what is held; raise if a shutdown has begun."""
        check()
        if (held := self.held) is None:
            raise PlacementError(f"The cluster {self.request.name!r} is not reserved. Reserve it first.")
        return held

    def reserve(self, *, unified: bool) -> None:
        """Reserve, unless that has been done."""
        request = replace(self.request, unified=unified)
        with self._change(max(request.timeout_s, request.wait_for_nodes_s)) as check:
            if self.held is not None:
                return
            on, watcher = connection(), uuid.uuid4().hex if self.monitor_memory else None
            slots = reserve(request, check=check)
            self.request = request
            self.held = Held(on=on, slots=slots, watcher=watcher)
            try:
                check()  # a signal handler may have found nothing to release
                if watcher is not None:
                    read_usage(self.held.node_ids, watcher)
            except BaseException:
                self.give_back()
                raise

    def adopt(self, groups: Sequence[PlacementGroup], *, timeout_s: float) -> None:
        """Hold placement groups of others, which are not removed, once Ray has placed them."""
        deadline = time.monotonic() + timeout_s
        with head_deadline(timeout_s):
            placed = read_placed(groups, deadline=deadline)
            slots = slots_of(placed, self.request.capacity, deadline=deadline)
        asks = [replace(ask, bundle=held.bundles[0]) for ask, held in zip(self.request.asks, placed, strict=True)]
        self.request = replace(self.request, asks=tuple(asks))
        self.held = Held(on=connection(), slots=slots)
        self.is_adopted = True

    def extend(
        self, counts: Sequence[int], model: Ask, *, timeout_s: float, wait_for_nodes_s: float
    ) -> tuple[int, ...]:
        """Reserve more logical nodes like `model`, add their slots at the end, and return their numbers."""
        began = time.monotonic()
        with self._change(max(timeout_s, wait_for_nodes_s)) as check:
            held, waited = self._held_now(check), time.monotonic() - began
            first = len(self.request.asks)
            asks = tuple(replace(model, node_idx=first + number, count=count) for number, count in enumerate(counts))
            part = replace(
                self.request,
                asks=asks,
                timeout_s=max(0.0, timeout_s - waited),
                wait_for_nodes_s=max(0.0, wait_for_nodes_s - waited),
                timeout_name="timeout_s",
            )
            bundles = {ask.node_idx: ask.bundle for ask in self.request.asks}
            amounts: dict[str, Counter[str]] = {}
            for slot in held.slots:
                amounts.setdefault(slot.node_id, Counter()).update(bundles[slot.node_idx])
            slots = reserve(part, held=amounts, check=check)
            with remove_on_error(lambda: [slot.placement_group for slot in slots]):
                self._held_now(check)
                self.request = replace(self.request, asks=(*self.request.asks, *asks))
                self.held = replace(held, slots=number_slots((*held.slots, *slots)))
            return tuple(ask.node_idx for ask in asks)

    def release(self, wanted: AbstractSet[int]) -> bool:
        """Release logical nodes, and return whether Ray had their resources back in time."""
        deadline = time.monotonic() + GIVE_BACK_S
        with self._change(GIVE_BACK_S) as check:
            before, request = self._held_now(check), self.request
            used = {slot.node_idx for slot in before.slots}
            if not wanted <= used:
                raise IndexError(f"logical node(s) {sorted(wanted - used)} are not in use; these are: {sorted(used)}")
            if names := close_slots([slot for slot in before.slots if slot.node_idx in wanted]):
                raise PlacementError(
                    f"Logical node(s) {sorted(wanted)} of {request.name!r} cannot be released: worker group(s) "
                    f"{', '.join(map(repr, names))} use their slots. Shut them down first."
                )
            asks = tuple(replace(ask, count=0) if ask.node_idx in wanted else ask for ask in request.asks)
            gpu_ids = {node_idx: gpus for node_idx, gpus in request.gpu_ids.items() if node_idx not in wanted}
            self.request = replace(request, asks=asks, gpu_ids=gpu_ids)
            rest = number_slots(slot for slot in before.slots if slot.node_idx not in wanted)
            self.held = replace(before, slots=rest)
            return self._return(before, self.held, deadline)

    def replace_lost(self, *, timeout_s: float) -> tuple[Slot, ...]:
        """Reserve slots in place of those whose node is gone, and return the new ones."""
        deadline = time.monotonic() + timeout_s
        with self._change(timeout_s) as check:
            alive, before = alive_nodes(), self._held_now(check)
            lost = dict.fromkeys(slot for slot in before.slots if slot.node_id not in alive)
            if not lost:
                return ()
            staying = [slot for slot in before.slots if slot.node_id in alive]
            used = {slot.placement_group.id for slot in staying}
            chosen = [slot for slot in lost if is_moved_by_ray(slot.placement_group)]
            moved = [slot for slot in chosen if slot.placement_group.id in used]
            # Ray would look for nodes for the others without a pause, and nothing of them is left.
            remove(before.groups_of(slot for slot in chosen if slot not in moved))
            new: list[Slot] = []
            with remove_on_error(lambda: [slot.placement_group for slot in new]):
                for node_idx, count in Counter(slot.node_idx for slot in lost if slot not in moved).most_common():
                    left_s = max(0.0, deadline - time.monotonic())
                    # A new node may be on its way: callers wait for one after a loss.
                    part = replace(
                        self.request,
                        asks=(replace(self.request.asks[node_idx], count=count),),
                        segment_size=None,
                        timeout_s=left_s,
                        wait_for_nodes_s=left_s,
                        unified=False,
                        timeout_name="timeout_s",
                    )
                    usable = functools.partial(self._find_usable, [*staying, *new], node_idx)
                    new += reserve(part, usable, check=check)
                slots = replace_slots(before.slots, lost, [*new, *self._find_moved(moved, deadline=deadline)])
                self._held_now(check)
                held = self.held = replace(before, slots=number_slots(slots))
            self._return(before, held, time.monotonic() + GIVE_BACK_S)  # groups that have lost all their bundles
            return tuple(slot for slot, old in zip(held.slots, before.slots, strict=True) if old in lost)

    def _find_usable(self, slots: Sequence[Slot], node_idx: int, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes that a logical node can use beside some slots."""
        size = self.request.segment_size
        if not (size or self.request.unified):
            return list(nodes)
        # Every logical node is on a physical node of its own, and in the domain of its segment.
        used = [ask.node_idx for ask in self.request.asks if ask.count]
        segment = {other: number // (size or 1) for number, other in enumerate(used)}
        near = {slot.node_id for slot in slots if segment[slot.node_idx] == segment[node_idx]}
        domain_of = {node.node_id: node_place(node)[0] for node in nodes}
        domains = {domain_of[node_id] for node_id in near & domain_of.keys()} or set(domain_of.values()) - {""}
        taken = {slot.node_id for slot in slots}
        free = [node for node in nodes if node.node_id not in taken]
        return [node for node in free if domain_of[node.node_id] in domains] if size else free

    def _find_moved(self, lost: Sequence[Slot], *, deadline: float) -> list[Slot]:
        """Return the slots of groups whose nodes Ray chooses, once it has placed the lost bundles again."""
        if not lost:
            return []
        groups = list({slot.placement_group.id: slot.placement_group for slot in lost}.values())
        placed = read_placed(groups, deadline=deadline)
        slots = {slot.key: slot for slot in slots_of(placed, self.request.capacity, deadline=deadline)}
        return [replace(slots[slot.key], node_idx=slot.node_idx) for slot in lost]

    def lease(self, slots: Sequence[Slot], low: int, high: int) -> list[PortLease]:
        """Lease a port on the node of each slot until everything is released."""
        mine, check = self.held, functools.partial(self._check, self._shutdowns)
        leases = [lease for (lease,) in lease_ports(slots, low=low, high=high, on_loss=self._note_lost)]
        try:
            # First added, then checked: a shutdown either sees them, or is seen.
            if mine is not None:
                mine.leases.update(dict.fromkeys(leases))
            check()
        except BaseException:
            release_ports(leases)
            raise
        return leases

    def _note_lost(self, leases: Sequence[PortLease], why: str) -> None:
        """Say that the agent of a node has died with leases of this cluster."""
        if (held := self.held) is not None:
            for lease in leases:
                held.leases.pop(lease, None)
        logger.warning("Cluster %r: %s", self.request.name, describe_lost(leases, why))

    def _return(self, before: Held, held: Held | None, deadline: float) -> bool:
        """Return what was held before and is not any more, and return whether Ray had the resources back in time."""
        slots = held.slots if held else ()
        staying = {slot.node_id for slot in slots}
        try:
            if before.watcher is not None:  # new nodes are watched from the first `get_resource_usage` on
                unwatch(set(before.node_ids) - staying, before.watcher)
            leases = [lease for lease in list(before.leases) if lease.node_id not in staying]
            for lease in leases:
                before.leases.pop(lease, None)
            # The groups need some of the time too.
            release_ports(leases, timeout_s=max(0.0, deadline - time.monotonic()) / 2)
        finally:
            used = {slot.placement_group.id for slot in slots}
            groups = [group for group in self._own_groups(before) if group.id not in used]
            returned = remove(groups, timeout_s=max(0.0, deadline - time.monotonic()))
        return returned

    def _own_groups(self, held: Held) -> list[PlacementGroup]:
        return [] if self.is_adopted else held.groups_of(held.slots)

    def give_back(self) -> bool:
        """Release ports and groups within `GIVE_BACK_S`, and return whether Ray had the resources back in time.

        What another thread waits for ends. In the middle of a reservation of the same thread nothing can be released.
        """
        deadline = time.monotonic() + GIVE_BACK_S
        self._shutdowns += 1
        is_inside = self._changer == threading.get_ident()
        with self._change(GIVE_BACK_S, advice=""):
            held, self.held = self.held, None
            if held is None and is_inside:
                raise PlacementError(
                    f"shutdown() was called inside of a reserve() of the cluster {self.request.name!r} on the same "
                    "thread, as from a signal handler, and could release nothing yet. That reserve() fails, and "
                    "releases what it has taken."
                )
            if held is None or held.ray_ended:
                return True  # nothing was held, or Ray ended, and with it everything that was
            return self._return(held, None, deadline)

    def leak(self) -> str:
        """Return what to say when the cluster is dropped while it holds something, or "" if it holds nothing."""
        held = self.held
        if held is None or held.ray_ended or not (held.leases or self._own_groups(held)):
            return ""
        return (
            f"The virtual cluster {self.request.name!r} was dropped without shutdown() while it held "
            f"{len(self._own_groups(held))} placement group(s) and {len(held.leases)} port(s). They are returned in "
            "the background. Use the cluster in a with statement, or call shutdown()."
        )


def replace_slots(slots: Sequence[Slot], lost: Container[Slot], new: Sequence[Slot]) -> list[Slot]:
    """Put each new slot in the place of a lost one of its logical node."""
    of_logical_node = group_pairs((slot.node_idx, slot) for slot in reversed(new))
    return [of_logical_node[slot.node_idx].pop() if slot in lost else slot for slot in slots]


def not_returned(what: str) -> PlacementError:
    """Return the error for something whose resources Ray did not have back in time."""
    return PlacementError(
        f"Ray did not return the resources of {what} within {GIVE_BACK_S:g} s. The groups are removed, but a process "
        "in them may still be ending: look at its node."
    )


def find_bundles(
    slots: Sequence[Slot], groups: Sequence[PlacementGroup], pairs: Iterable[tuple[int, int]]
) -> list[Slot]:
    """Return the slot of each pair of a number of a placement group and Ray's index of a bundle in it."""
    by_bundle = {(slot.placement_group.id, slot.bundle_index): slot for slot in slots}
    chosen = []
    for pg_idx, bundle_idx in pairs:
        if not 0 <= pg_idx < len(groups):
            raise IndexError(f"placement group {pg_idx} of {len(groups)}: valid are 0 to {len(groups) - 1}")
        slot = by_bundle.get((groups[pg_idx].id, bundle_idx))
        if slot is None:
            raise IndexError(f"placement group {pg_idx} has no bundle {bundle_idx}")
        chosen.append(slot)
    return chosen
