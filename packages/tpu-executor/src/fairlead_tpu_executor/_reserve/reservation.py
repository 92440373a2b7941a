# SPDX-License-Identifier: Apache-2.0
"""The slices of a pool and their ports, held together and given back together."""

import itertools
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fairlead_placement.spi import Waiting, connection

from .._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from .._accelerators.slices import SliceInfo
from .._health import Head
from ..exceptions import HeadUnreachableError, InsufficientSlicesError, TpuExecutorError
from .leases import Lease, Ports, find_lost, give_back, megascale_port, take
from .scaling import CapacityRequest, choose_size, choose_waits, survey

logger = logging.getLogger(__name__)
# A chip that is stuck may work again later: its VM is repaired, or the process that held the chip ends.
_QUARANTINE_S = 300.0
_POLL_S = (0.05, 1.0)
# Seconds after the timeout in which another driver may still take a free slice first.
_RACES_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """What a reservation holds at one time."""

    leases: tuple[Lease, ...]
    coordinators: tuple[str, ...]  # the `host:port` of worker 0 of each slice
    megascale: str | None  # the `host:port` of the coordinator of all slices; None with one slice

    @cached_property
    def slices(self) -> tuple[SliceInfo, ...]:
        """The slices, without their placement groups."""
        return tuple(lease.slice for lease in self.leases)

    @cached_property
    def first_hosts(self) -> tuple[int, ...]:
        """The number of hosts before each slice, and at the end the number of all hosts."""
        return tuple(itertools.accumulate((each.num_hosts for each in self.slices), initial=0))


class Reservation:
    """The one owner of what a pool holds. A finalizer keeps it alive, and not the pool itself."""

    def __init__(self, config: AcceleratorConfigType) -> None:
        self.config = config
        self.head = Head(config.head_timeout_s)
        self.sizes: Sequence[int] = config.sizes  # the allowed numbers of slices, ascending
        self.taken = 0  # slices taken so far, replacements included
        self.epoch = 0  # how often the reservation was closed
        self._leases: tuple[Lease, ...] = ()
        self._ports = Ports()
        # By the node and the reason.
        self._quarantined_until: dict[tuple[str, str], float] = {}
        # Reentrant: the finalizer may run in the middle of anything.
        self._lock = threading.RLock()

    @property
    def slices(self) -> tuple[SliceInfo, ...]:
        return tuple(lease.slice for lease in self._leases)

    def resize(self, sizes: Sequence[int]) -> None:
        """Hold another number of slices from now on. Raises the errors of `ensure`."""
        self.sizes = sizes
        self.ensure()

    def ensure(self, epoch: int | None = None) -> None:
        """Hold healthy slices, as many as allowed: those that are held, and new ones in the place of lost ones.

        After an error nothing is held, except that after a `HeadUnreachableError` something may be. If the reservation
        was closed since the caller's epoch (None for the present one), that is a `TpuExecutorError`.
        """
        epoch = self.epoch if epoch is None else epoch
        with self._lock:
            lost = self.head.call(find_lost, self._leases, self._quarantined())
            before = self._leases
            if lost:
                self._leases = tuple(lease for lease in self._leases if lease not in lost)
                self.head.call(give_back, lost)
            try:
                self._scale(len(lost), epoch)
                self._update_ports()
            except BaseException:
                self.give_back()
                raise
            self.taken += sum(lease not in before for lease in self._leases)

    def _scale(self, lost: int, epoch: int) -> None:
        """Hold an allowed number of slices, including those that are held, after `lost` were lost.

        Nothing more is taken during the wait: two jobs that each hold a part of what both need would wait forever.
        """
        config, sizes, held = self.config, self.sizes, self._leases
        largest_s, any_s = choose_waits(
            sizes, len(held), lost, scale_s=config.scale_timeout_s, replace_s=config.replace_timeout_s
        )
        began = time.monotonic()
        pause = _POLL_S[0]
        with Waiting(f"Waiting for {sizes[-1]} x {config.kind}") as waiting, CapacityRequest(config, self.head) as more:
            while True:
                self.check_open(epoch)
                present = self.head.call(survey, config, self.slices, self._quarantined())
                free = present.intact
                waited = time.monotonic() - began
                size = choose_size(sizes, len(held), len(free), waited_out=waited >= largest_s)
                if size is not None:
                    more.withdraw()
                    wanted = free[: max(0, size - len(held))]
                    taken = self.head.call(take, config, wanted, undo=give_back) if wanted else []
                    if taken is not None:
                        extra = held[size:]
                        self._leases = (*held[:size], *taken, *extra)
                        if extra:
                            self.head.call(give_back, extra)
                        self._leases = (*held[:size], *taken)
                        return
                    # Somebody else was faster, so the nodes are read again.
                if waited >= any_s + (0 if size is None else _RACES_S):
                    found = len(held) + len(free)
                    raise InsufficientSlicesError(config.kind, tuple(sizes), found, present.lacking, waited)
                more.show(sizes[-1] - len(held) - len(free))
                counts = f"{len(held)} held, {len(free)} free"
                waiting.show("; ".join([counts, *map(str, present.lacking[:2])]), any_s)
                nearest = largest_s if waited < largest_s else any_s
                time.sleep(max(0.01, min(pause, began + nearest - time.monotonic())))
                pause = min(2 * pause, _POLL_S[1])

    def _update_ports(self) -> None:
        ports, megascale = self._ports, None
        if isinstance(self.config, TpuAcceleratorConfig) and len(self._leases) > 1:
            megascale = megascale_port(self.config, os.environ)
        try:
            self.head.call(ports.update, self._leases, megascale, undo=lambda _: ports.release())
        except HeadUnreachableError:
            self._ports = Ports()  # The unfinished request owns the old ones.
            raise

    def check_open(self, epoch: int, doing: str = "it was in use") -> None:
        """Raise a `TpuExecutorError` if the reservation was closed since an epoch."""
        if self.epoch != epoch:
            raise TpuExecutorError(f"The pool was closed while {doing}. Use a pool that stays open.")

    def quarantine(self, reasons: Mapping[str, str]) -> None:
        """Do not use these nodes for some minutes, each for its reason."""
        self._quarantined_until |= dict.fromkeys(reasons.items(), time.monotonic() + _QUARANTINE_S)

    def release(self, reasons: Collection[str]) -> None:
        """Use the nodes again that are quarantined for these reasons."""
        self._quarantined_until = {
            key: until for key, until in self._quarantined_until.items() if key[1] not in reasons
        }

    def _quarantined(self) -> frozenset[str]:
        now = time.monotonic()
        self._quarantined_until = {key: until for key, until in self._quarantined_until.items() if until > now}
        return frozenset(node_id for node_id, _ in self._quarantined_until)

    def snapshot(self) -> Snapshot:
        """Return what is held now."""
        with self._lock:
            ports = self._ports
            return Snapshot(self._leases, tuple(map(ports.coordinator, self._leases)), ports.megascale)

    def close(self) -> bool:
        """End every use of the reservation, and give everything back. Returns the same as `give_back`."""
        self.epoch += 1
        return self.give_back()

    def give_back(self) -> bool:
        """Return slices and ports, and whether Ray had the resources back in time. Can be repeated.

        When Ray's head does not answer, a warning names what is still held, and the next call tries again.
        """
        with self._lock:
            leases, self._leases = self._leases, ()
            ports, self._ports = self._ports, Ports()
            if not connection():
                return True  # Ray has ended, and with it everything that was held.

            def give_back_all() -> bool:
                try:
                    ports.release()
                finally:
                    returned = give_back(leases)
                return returned

            try:
                return self.head.call(give_back_all)
            except HeadUnreachableError as error:
                self._leases, self._ports = leases, ports
                logger.warning(
                    "A closed pool still holds %s and their ports. Close it again when Ray's head answers. %s",
                    ", ".join(lease.slice.slice_name for lease in leases) or "no slices",
                    error,
                )
                return False

    def describe_leak(self) -> str:
        """Return the warning for a pool that is dropped while it holds slices, or "" if it holds none."""
        if not self._leases or not connection():
            return ""
        return (
            f"A slice pool was dropped without close() while it held {len(self._leases)} slice(s). They are returned "
            "in the background. Use the pool in a with statement, or call close()."
        )
