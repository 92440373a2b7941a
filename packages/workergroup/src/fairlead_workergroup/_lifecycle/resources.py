# SPDX-License-Identifier: Apache-2.0
"""What a group holds and has to give back."""

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import ray

from fairlead_placement import PlacementError, PortLease
from fairlead_placement.spi import SlotClaim, connection

from .._start.recipe import Recipe
from .shutdown import WorkerProcess, kill_and_wait

__all__ = ["Held"]

logger = logging.getLogger(__name__)


@dataclass
class Held:
    """Apart from the group, so that the group's finalizer does not keep it alive."""

    made_on: str = field(default_factory=connection)
    claim: SlotClaim | None = None
    lease: PortLease | None = None
    workers: dict[int, Any] = field(default_factory=dict)
    processes: dict[int, WorkerProcess] = field(default_factory=dict)
    recipe: Recipe | None = None
    gave_all_back: bool = True
    _ending: threading.RLock = field(default_factory=threading.RLock)

    @property
    def connected(self) -> bool:
        """Whether the Ray that the group was made on is still the one of this process."""
        return self.made_on == connection()

    def give_back(self) -> None:
        """End the workers, then release what they stood on. `gave_all_back` says whether all went well.

        Of several threads at once the first does it, and the others wait until it has.
        """
        with self._ending:
            self.gave_all_back = self._give_back() and self.gave_all_back

    def _give_back(self) -> bool:
        if self.claim is None and self.lease is None and not self.workers and not self.processes:
            return True
        workers, processes = dict(self.workers), dict(self.processes)
        self.workers.clear()
        self.processes.clear()
        self.recipe = None
        ended = True
        if self.connected:
            try:
                ended = not kill_and_wait(workers, processes)
            except (ray.exceptions.RayError, PlacementError) as error:
                logger.warning("ending the workers of a group: %s", error)
                ended = False
            try:
                self.release_port()
            except (ray.exceptions.RayError, PlacementError) as error:
                logger.warning("giving the port of a group back: %s", error)
                ended = False
        self.lease = None
        if self.claim is not None:
            self.claim.release()
            self.claim = None
        return ended

    def release_port(self) -> None:
        """Give the master port back; its node, and so the lease, may be gone."""
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.release()

    def leak(self) -> str:
        """Return what to say when the group is dropped while it holds something, or "" if it holds nothing."""
        claim = self.claim
        if claim is None or not self.connected:
            return ""
        return (
            f"The worker group {claim.holder!r} was dropped without shutdown(). Its {len(self.workers)} worker(s) are "
            "ended in the background. Use the group in a with statement, or call shutdown()."
        )
