# SPDX-License-Identifier: Apache-2.0
"""What a group holds and has to give back: claimed slots, a port, and processes."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from fairlead_placement import PlacementError, PortLease, lease_ports
from fairlead_placement.spi import SlotClaim, claim_slots

from .._members import Place, Roster
from .shutdown import WorkerProcess, kill_and_wait

__all__ = ["Resources"]

logger = logging.getLogger(__name__)


@dataclass
class Resources:
    """Kept apart from the group, so that the group's finalizer does not keep the group alive.

    Attributes:
        roster: of the group.
        claim: of the group on its slots.
        lease: of the master port.
        workers: the actors to end, by rank, also those that have not started yet.
        processes: where each of them runs, by rank.
        gave_all_back: whether everything could be given back so far.
    """

    roster: Roster
    claim: SlotClaim | None = None
    lease: PortLease | None = None
    workers: dict[int, Any] = field(default_factory=dict)
    processes: dict[int, WorkerProcess] = field(default_factory=dict)
    gave_all_back: bool = True
    _ending: threading.RLock = field(default_factory=threading.RLock)

    def claim_slots(self, places: Sequence[Place]) -> None:
        """Claim the slots of all ranks, in place of those claimed before.

        Raises:
            ResourceInsufficientError: a slot has no room for another group.
        """
        if self.claim is not None:
            self.claim.release()
        self.claim = claim_slots([place.slot for place in places], self.roster.name_prefix, group=self.roster)

    def lease_port(self, place: Place, ports: tuple[int, int] | None) -> PortLease:
        """Return the lease of the master port; lease one on the node of a place if there is none."""
        if self.lease is None:
            bounds = {} if ports is None else {"low": ports[0], "high": ports[1]}
            ((self.lease,),) = lease_ports([place.slot], **bounds)
        return self.lease

    def release_port(self) -> None:
        """Give the master port back; its node, and so the lease, may be gone."""
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.release()

    def end(self, ranks: Sequence[int]) -> list[str]:
        """End the workers of these ranks and the processes they have started; return descriptions of what remains."""
        workers = {rank: self.workers[rank] for rank in ranks if rank in self.workers}
        return kill_and_wait(workers, {rank: self.processes[rank] for rank in ranks if rank in self.processes})

    def give_back(self) -> None:
        """End the workers, then release what they stood on. `gave_all_back` says whether all went well.

        If several threads call it, the first one does it, and the others wait until it is done.
        """
        with self._ending:
            self.gave_all_back = self._give_back() and self.gave_all_back

    def _give_back(self) -> bool:
        if self.claim is None and self.lease is None and not self.workers and not self.processes:
            return True
        workers, processes = dict(self.workers), dict(self.processes)
        self.workers.clear()
        self.processes.clear()
        ended = True
        if self.roster.connected:
            try:
                ended = not kill_and_wait(workers, processes)
            except (ray.exceptions.RayError, PlacementError) as error:
                logger.warning("Cannot end the workers of a group: %s", error)
                ended = False
            try:
                self.release_port()
            except (ray.exceptions.RayError, PlacementError) as error:
                logger.warning("Cannot give the port of a group back: %s", error)
                ended = False
        self.lease = None
        if self.claim is not None:
            self.claim.release()
            self.claim = None
        return ended

    def leak(self) -> str:
        """Return the warning for a group that is dropped while it holds something, or "" if it holds nothing."""
        claim = self.claim
        if claim is None or not self.roster.connected:
            return ""
        return (
            f"The worker group {claim.holder!r} was dropped without shutdown(). Its {len(self.workers)} worker(s) are "
            "ended in the background. Use the group in a with statement, or call shutdown()."
        )
