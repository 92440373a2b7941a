# SPDX-License-Identifier: Apache-2.0
"""Everything that a group holds and has to release: claimed slots, a port, and processes."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import ray

from fairlead_placement import (
    PlacementError,
    PortLease,
    PortUnavailableError,
    ResourceInsufficientError,
    Slot,
    lease_ports,
)
from fairlead_placement.extension import SlotClaim, claim_slots

from .._membership.roster import Roster
from .._observe.head import alive_nodes, draining_nodes
from .._observe.registration import Registration
from .._start.layout import choose_slots
from .._world import NEVER, Deadline
from .shutdown import RunningWorker, kill_and_wait

logger = logging.getLogger(__name__)


def usable_slots(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots in which a process can start now: Ray starts none on a node that is lost or drains."""
    slots = list(slots)
    nodes = alive_nodes() - draining_nodes() if slots else frozenset()
    return [slot for slot in slots if slot.node_id in nodes]


# For a request about ports without a deadline of its own.
PORTS_S = 60.0
# An agent that is late releases the port later, so nobody has to wait longer.
RELEASE_S = 1.0


def _lease(slot: Slot, ports: tuple[int, int] | None, deadline: Deadline) -> PortLease:
    left_s = deadline.left(at_most=PORTS_S) or 0.0
    if ports is None:
        ((lease,),) = lease_ports([slot], timeout_s=left_s)
    else:
        ((lease,),) = lease_ports([slot], low=ports[0], high=ports[1], timeout_s=left_s)
    return lease


@dataclass
class Resources:
    """The resources of a group, kept apart from it so that the group's finalizer does not keep the group alive."""

    roster: Roster
    ports: tuple[int, int] | None = None  # the first and the last port of the cluster; None for any ports
    master_ports: tuple[int, int] | None = None  # those that the user has given for the master port
    lease: PortLease | None = None  # of the master port
    next_lease: PortLease | None = None  # of the master port of the next epoch, while a resize starts it
    registration: Registration | None = None
    gave_all_back: bool = True  # so far, without a failure
    closed: bool = False  # whether the release has begun
    _workers: dict[int, RunningWorker] = field(default_factory=dict)
    _claims: dict[tuple[str, int], SlotClaim] = field(default_factory=dict)
    # It protects the end: one thread gives back, and others wait until it has. A signal handler may end the group too.
    _ending: threading.RLock = field(default_factory=threading.RLock)

    def add(self, workers: Mapping[int, RunningWorker]) -> None:
        """Add workers that have to be ended, by rank, in place of those added before for these ranks."""
        self._workers.update(workers)

    def claim_free(self, slots: Iterable[Slot], count: int, *, tied: int = 1) -> list[Slot]:
        """Claim and return the first usable slots that no group uses, in groups of `tied` on one logical node.

        If there are not enough, fewer are returned, and none is claimed.
        """
        free: list[Slot] = []
        for slot in usable_slots(slots):
            if slot.key not in self._claims and len(choose_slots(free, count, tied=tied)) < count:
                with contextlib.suppress(ResourceInsufficientError):  # other groups fill it
                    self._claim([slot])
                    free.append(slot)
        chosen = choose_slots(free, count, tied=tied)
        kept = {slot.key for slot in chosen} if len(chosen) == count else set()
        for slot in free:
            if slot.key not in kept:
                self._claims.pop(slot.key).release()
        return chosen

    def claim_slots(self, slots: Iterable[Slot]) -> None:
        """Claim these slots in addition to those that are claimed already; all of them, or none."""
        new = {slot.key: slot for slot in slots if slot.key not in self._claims}
        usable = {slot.key for slot in usable_slots(new.values())}
        if gone := [slot for key, slot in new.items() if key not in usable]:
            raise ResourceInsufficientError(
                f"{self.roster.name_prefix!r} cannot run in bundle {gone[0].bundle_index} of logical node "
                f"{gone[0].node_idx}: its node {gone[0].node_id[:8]} is lost, or about to end because Ray drains it. "
                "Replace lost nodes with the cluster's replace_lost_nodes(), or use other slots."
            )
        self._claim(new.values())

    def _claim(self, slots: Iterable[Slot]) -> None:
        made: dict[tuple[str, int], SlotClaim] = {}
        try:
            for slot in slots:
                made[slot.key] = claim_slots([slot], self.roster.name_prefix, group=self.roster)
        except BaseException:  # including Ctrl-C: a full slot is waited for
            for claim in made.values():
                claim.release()
            raise
        self._claims.update(made)

    def keep_slots(self, slots: Iterable[Slot]) -> None:
        """Release the claims of all slots except these."""
        kept = {slot.key for slot in slots}
        for key in [key for key in self._claims if key not in kept]:
            self._claims.pop(key).release()

    def lease_master_port(self, slot: Slot, deadline: Deadline = NEVER) -> PortLease:
        """Return the lease of the master port; lease one on the node of a slot if there is none."""
        if self.lease is None:
            self.lease = self._lease_master_port(slot, deadline)
        return self.lease

    @property
    def has_one_port(self) -> bool:
        """Whether the master port is the same in all epochs."""
        return self.master_ports is not None and self.master_ports[0] == self.master_ports[1]

    def _lease_master_port(self, slot: Slot, deadline: Deadline) -> PortLease:
        if self.master_ports is None:
            return _lease(slot, self.ports, deadline)
        try:
            return _lease(slot, self.master_ports, deadline)
        except PortUnavailableError as error:
            error.add_note(
                "It is the WorkerOptions(master_port=...) of a group. Give another port or range, or leave it out, and "
                "the group leases a port of the cluster's port_range."
            )
            raise

    def lease_next_port(self, slot: Slot, deadline: Deadline) -> None:
        """Lease the master port of the next epoch on the node of a slot, beside the present one."""
        self.next_lease = self._lease_master_port(slot, deadline)

    def take_next_port(self) -> None:
        """Use the master port of the next epoch from now on, and release the one before."""
        if self.next_lease is None:  # a shutdown of another thread has released it
            raise self.roster.ended_error()
        if (before := self.lease) is not None:
            try:
                before.release(timeout_s=RELEASE_S)
            except PlacementError as error:  # the epoch has begun, and does not need the port
                logger.warning("Cannot release the port of an earlier epoch: %s", error)
        self.lease, self.next_lease = self.next_lease, None

    def drop_next_port(self) -> None:
        """Release the master port of an epoch that has not begun."""
        self._release("next_lease")

    def release_port(self) -> None:
        """Release the master port, even if its node, and with it the lease, is lost."""
        self.drop_next_port()
        self._release("lease")

    def _release(self, name: Literal["lease", "next_lease"]) -> None:
        """Release a lease, and forget it then: after Ctrl-C in between, the end of the group releases it."""
        lease: PortLease | None = getattr(self, name)
        try:
            if lease is not None:
                lease.release(timeout_s=RELEASE_S)
        except PlacementError:
            setattr(self, name, None)
            raise
        setattr(self, name, None)

    def forget(self, ranks: Iterable[int]) -> None:
        """Drop workers that have ended, with their processes, and whose ranks have left the group."""
        for rank in ranks:
            self._workers.pop(rank, None)

    def discard(self, ranks: Sequence[int]) -> None:
        """End workers that do not come back, as `end` does, and forget them."""
        try:
            self.end(ranks)
        finally:
            self.forget(ranks)

    def end(self, ranks: Sequence[int]) -> list[str]:
        """End the workers of these ranks and the processes they have started; return descriptions of those alive."""
        workers = {rank: self._workers[rank] for rank in ranks if rank in self._workers}
        return kill_and_wait(workers) if workers and self.roster.connected else []

    def give_back(self) -> None:
        """End the workers, then release the port and the slots; `gave_all_back` says whether all went well.

        If several threads call it, the first one does it, and the others wait until it is done.
        """
        with self._ending:
            self.closed = True
            workers, self._workers = self._workers, {}
            registration = self.registration
            steps: dict[str, Callable[[], list[str] | None]] = {
                "end the workers": lambda: kill_and_wait(workers) if workers else None,
                "release the port": self.release_port,
                "withdraw the registration": lambda: None if registration is None else registration.withdraw(),
            }
            for name, step in steps.items() if self.roster.connected else ():
                try:
                    is_done = not step()
                except (ray.exceptions.RayError, PlacementError) as error:
                    if is_done := not self.roster.connected:  # it has ended, and everything with it
                        break
                    logger.warning("Cannot %s of a group: %s", name, error)
                self.gave_all_back = self.gave_all_back and is_done
            self.lease = self.next_lease = None
            for claim in self._claims.values():
                claim.release()
            self._claims.clear()

    def give_back_late(self) -> None:
        """Give back what was acquired while the group ended, unless its end will do that when the cleanup has run."""
        if self.closed or not self.roster.connected:
            self.give_back()

    def leak(self) -> str:
        """Return the warning for a group that is dropped while it holds something, or "" if it holds nothing."""
        if not self._claims or not self.roster.connected:
            return ""
        return (
            f"The worker group {self.roster.name_prefix!r} was dropped without shutdown(). Its "
            f"{len(self._workers)} worker(s) are ended in the background. Use the group in a with statement, or call "
            "shutdown()."
        )
