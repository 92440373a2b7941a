# SPDX-License-Identifier: Apache-2.0
"""Holds the state of a cluster: its reservation and everything that was taken on it, and releases it together."""

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.util.placement_group import PlacementGroup

from .._model import Request, group_pairs
from .._nodes.head import alive_nodes, head_deadline
from .._nodes.ports import PortLease, lease_ports, release_ports
from .._nodes.usage import NodeUsage, read_usage, unwatch, watch
from .._ray_private import connection
from .._slot import Slot
from ..exceptions import PlacementError, PlacementTimeoutError
from .groups import remove, remove_on_error
from .slots import number_slots
from .wait import reserve

# Seconds in which Ray has to have the resources back.
GIVE_BACK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Held:
    """The resources of a cluster between its reservation and its shutdown. Each change makes another one."""

    on: object  # the connection to Ray
    slots: tuple[Slot, ...]  # in physical order
    # One dictionary for the whole reservation. Any thread adds to it, by single operations.
    leases: dict[PortLease, None] = field(default_factory=dict)

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
    watcher: str | None = None  # for which the agents of the nodes sample memory
    held: Held | None = None
    # Reentrant: a signal handler may shut the cluster down.
    _changing: Any = field(default_factory=threading.RLock)
    _shutdowns: int = 0  # whatever began before the latest of them ends without a result

    @contextlib.contextmanager
    def _change(self, timeout_s: float) -> Iterator[Callable[[], None]]:
        """Keep other threads from changing what is held; yield a function that raises if a shutdown has begun since."""
        check, began = functools.partial(self._check, self._shutdowns), time.monotonic()
        if not self._changing.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise PlacementTimeoutError(
                f"Waited {timeout_s:.1f} s: another thread still changes the cluster {self.request.name!r}. Try again "
                "when that has ended."
            )
        try:
            with head_deadline(max(0.0, began + timeout_s - time.monotonic())):
                yield check
        finally:
            self._changing.release()

    def _check(self, shutdowns: int) -> None:
        """Raise if a shutdown has begun since there were so many."""
        if self._shutdowns != shutdowns:
            raise PlacementError(
                f"The cluster {self.request.name!r} was shut down in the meantime, and holds nothing: "
                "reserve the cluster and try again."
            )

    def reserve(self, *, unified: bool) -> None:
        """Reserve, unless that has been done."""
        request = replace(self.request, unified=unified)
        with self._change(max(request.timeout_s, request.wait_for_nodes_s)) as check:
            if self.held is not None:
                return
            self.request, self.held = request, Held(on=connection(), slots=reserve(request, check))
            try:
                check()  # a signal handler may have found nothing to release
                if self.watcher is not None:
                    watch({slot.node_id for slot in self.held.slots}, self.watcher)
            except BaseException:
                self.give_back()
                raise

    def replace_lost(self, *, timeout_s: float) -> tuple[Slot, ...]:
        """Reserve slots in place of those whose node is gone, and return the new ones."""
        deadline = time.monotonic() + timeout_s
        with self._change(timeout_s) as check:
            alive = alive_nodes()
            if (before := self.held) is None:
                raise PlacementError(f"The cluster {self.request.name!r} is not reserved. Reserve it first.")
            lost = dict.fromkeys(slot for slot in before.slots if slot.node_id not in alive)
            if not lost:
                return ()
            # Ray would look for nodes for a group that is not pinned, and could take the room of its replacement.
            remove(before.groups_of(lost))
            new: list[Slot] = []
            with remove_on_error(lambda: [slot.placement_group for slot in new]):
                for node_idx, count in Counter(slot.node_idx for slot in lost).most_common():
                    left_s = max(0.0, deadline - time.monotonic())
                    # A new node may be on its way: callers wait for one after a loss.
                    part = replace(
                        self.request,
                        asks=(replace(self.request.asks[node_idx], count=count),),
                        timeout_s=left_s,
                        wait_for_nodes_s=left_s,
                    )
                    new += reserve(part, check)
                check()
                # Each new slot takes the place of a lost one of its logical node.
                of_node = group_pairs((slot.node_idx, slot) for slot in reversed(new))
                slots = [of_node[slot.node_idx].pop() if slot in lost else slot for slot in before.slots]
                held = self.held = replace(before, slots=number_slots(slots))
            self._return(before, held, time.monotonic() + GIVE_BACK_S)  # the ports on the lost nodes
            return tuple(slot for slot, old in zip(held.slots, before.slots, strict=True) if old in lost)

    def lease(self, slots: Sequence[Slot], low: int, high: int) -> list[PortLease]:
        """Lease a port on the node of each slot until everything is released."""
        mine, shutdowns = self.held, self._shutdowns
        leases = [lease for (lease,) in lease_ports(slots, low=low, high=high)]
        if mine is not None:
            mine.leases.update(dict.fromkeys(leases))
        # First added, then checked: a shutdown either sees them, or is seen.
        if self._shutdowns != shutdowns:
            release_ports(leases)
            self._check(shutdowns)
        return leases

    def read_usage(self, node_ids: Sequence[str]) -> tuple[NodeUsage, ...]:
        """Return the memory of nodes, whose agents go on sampling it if the cluster monitors memory."""
        usage = read_usage(node_ids, self.watcher)
        if self.watcher is not None and self.held is None:  # a shutdown may not have seen the agents
            unwatch(node_ids, self.watcher)
        return usage

    def _return(self, before: Held, held: Held | None, deadline: float) -> bool:
        """Return what was held before and is not any more, and return whether Ray had the resources back in time."""
        slots = held.slots if held else ()
        staying = {slot.node_id for slot in slots}
        try:
            if self.watcher is not None:  # new nodes are watched from the first `get_resource_usage` on
                unwatch({slot.node_id for slot in before.slots} - staying, self.watcher)
            leases = [lease for lease in list(before.leases) if lease.node_id not in staying]
            for lease in leases:
                before.leases.pop(lease, None)
            # The groups need some of the time too.
            release_ports(leases, timeout_s=max(0.0, deadline - time.monotonic()) / 2)
        finally:
            used = {slot.placement_group.id for slot in slots}
            groups = [group for group in before.groups_of(before.slots) if group.id not in used]
            returned = remove(groups, timeout_s=max(0.0, deadline - time.monotonic()))
        return returned

    def give_back(self) -> bool:
        """Release ports and groups within `GIVE_BACK_S`, and return whether Ray had the resources back in time.

        A change that is under way, on another thread or on this one below a signal handler, fails and releases what it
        has taken.
        """
        deadline = time.monotonic() + GIVE_BACK_S
        self._shutdowns += 1
        with self._change(GIVE_BACK_S):
            held, self.held = self.held, None
            if held is None or held.ray_ended:
                return True  # nothing was held, or Ray ended, and with it everything that was
            return self._return(held, None, deadline)

    def leak(self) -> str:
        """Return what to say when the cluster is dropped while it holds something, or "" if it holds nothing."""
        held = self.held
        if held is None or held.ray_ended or not held.slots:
            return ""
        return (
            f"The virtual cluster {self.request.name!r} was dropped without shutdown() while it held "
            f"{len(held.groups_of(held.slots))} placement group(s) and {len(held.leases)} port(s). They are returned "
            "in the background. Use the cluster in a with statement, or call shutdown()."
        )
