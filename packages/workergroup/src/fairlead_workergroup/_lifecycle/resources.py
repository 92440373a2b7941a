# SPDX-License-Identifier: Apache-2.0
"""Everything that a group holds and has to release: claimed slots, a port, and processes."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ray

from fairlead_placement import PlacementError, PortLease, lease_ports
from fairlead_placement.spi import SlotClaim, claim_slots

from .._members import Place, Roster
from .._observe.registration import Registration
from .shutdown import RunningWorker, kill_and_wait

logger = logging.getLogger(__name__)


@dataclass
class Resources:
    """The resources of a group, kept apart from it so that the group's finalizer does not keep the group alive.

    Attributes:
        roster: the roster of the group.
        claim: the claim of the group on its slots.
        lease: the lease of the master port.
        registration: what the group publishes about itself.
        gave_all_back: whether everything has been released so far without a failure.
    """

    roster: Roster
    claim: SlotClaim | None = None
    lease: PortLease | None = None
    registration: Registration | None = None
    gave_all_back: bool = True
    _workers: dict[int, RunningWorker] = field(default_factory=dict)
    _ending: threading.RLock = field(default_factory=threading.RLock)

    def add(self, workers: Mapping[int, RunningWorker]) -> None:
        """Add workers that have to be ended, by rank, in place of those added before for these ranks."""
        self._workers.update(workers)

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
        """Release the master port, even if its node, and with it the lease, is lost."""
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.release()

    def end(self, ranks: Sequence[int]) -> list[str]:
        """End the workers of these ranks and the processes they have started; return descriptions of those alive."""
        return kill_and_wait({rank: self._workers[rank] for rank in ranks if rank in self._workers})

    def give_back(self) -> None:
        """End the workers, then release the port and the slots; `gave_all_back` says whether all went well.

        If several threads call it, the first one does it, and the others wait until it is done.
        """
        with self._ending:
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
                    logger.warning("Cannot %s of a group: %s", name, error)
                    is_done = False
                self.gave_all_back = self.gave_all_back and is_done
            self.lease = None
            if self.claim is not None:
                self.claim.release()
                self.claim = None

    def leak(self) -> str:
        """Return the warning for a group that is dropped while it holds something, or "" if it holds nothing."""
        claim = self.claim
        if claim is None or not self.roster.connected:
            return ""
        return (
            f"The worker group {claim.holder!r} was dropped without shutdown(). Its {len(self._workers)} worker(s) are "
            "ended in the background. Use the group in a with statement, or call shutdown()."
        )
