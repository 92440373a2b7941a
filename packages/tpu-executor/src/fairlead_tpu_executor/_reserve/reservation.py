# SPDX-License-Identifier: Apache-2.0
"""The slices of a pool and all that was taken on them, held together and given back together."""

import logging
import os
import threading
import time
from collections.abc import Sequence

import ray

from fairlead_placement import Slot

from .._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from .._health import Head
from .._nodes import lost_leases
from .._run.environment import Variables, host_environment, megascale_port
from .._run.targets import Place, places_of
from .._run.work import Work
from ..exceptions import HeadUnreachableError, TpuExecutorError
from .leases import Lease, give_back
from .ports import Ports
from .scaling import patience, scale

__all__ = ["QUARANTINE_S", "Holding"]

logger = logging.getLogger(__name__)
# A chip that is stuck may come back: its VM is repaired, or whoever held it ends.
QUARANTINE_S = 300.0


class Holding:
    """What a pool holds. Apart from the pool, so that its finalizer does not keep it alive."""

    def __init__(self, config: AcceleratorConfigType) -> None:
        self.config = config
        self.sizes: Sequence[int] = config.sizes
        self.leases: list[Lease] = []
        self.reservations = 0
        self.closed = 0
        self.head = Head(config.head_timeout_s)
        self._ports = Ports()
        self._bad: dict[str, float] = {}
        # Reentrant: the finalizer may run in the middle of anything.
        self._lock = threading.RLock()

    def ready(self, closed: int | None = None) -> list[Lease]:
        """Healthy slices, as many as allowed: those that are held, and new ones in the place of lost ones.

        Args:
            closed: how often it had been closed when it was asked for; now if None.

        Raises:
            InsufficientSlicesError: not enough within the scale timeout; nothing is held then.
            PortUnavailableError: a port that was asked for is taken; nothing is held then.
            TpuExecutorError: it has been closed since, or meanwhile; nothing is held then.
            HeadUnreachableError: Ray's head did not answer in time; what is held may still be held.
        """
        closed = self.closed if closed is None else closed
        with self._lock:
            quarantined = self.quarantined()
            lost = self.head.ask(lost_leases, self.leases, quarantined)
            before = list(self.leases)
            if lost:
                self._keep([lease for lease in self.leases if lease not in lost])
                self.head.ask(give_back, lost)
            try:
                scale(
                    self.config,
                    self.sizes,
                    self.leases,
                    self.head,
                    limits=patience(
                        self.sizes,
                        len(self.leases),
                        len(lost),
                        scale_s=self.config.scale_timeout_s,
                        replace_s=self.config.replace_timeout_s,
                    ),
                    quarantined=self.quarantined,
                    keep=self._keep,
                    go_on=lambda: self.check_open(closed),
                )
                port = None
                if isinstance(self.config, TpuAcceleratorConfig) and len(self.leases) > 1:
                    port = megascale_port(self.config, os.environ)
                self._update_ports(port)
            except BaseException:
                self.give_back()
                raise
            self.reservations += sum(lease not in before for lease in self.leases)
            return list(self.leases)

    def _update_ports(self, megascale: int | None) -> None:
        ports = self._ports
        try:
            self.head.ask(ports.update, self.leases, megascale, undo=lambda _: ports.release())
        except HeadUnreachableError:
            self._ports = Ports()  # the request that is under way has the old ones
            raise

    def check_open(self, closed: int) -> None:
        """Raise if it has been closed more often."""
        if self.closed != closed:
            raise TpuExecutorError("the pool was closed meanwhile. Use a pool that stays open.")

    def _keep(self, leases: Sequence[Lease]) -> None:
        self.leases = list(leases)

    def quarantine(self, node_ids: Sequence[str] | frozenset[str]) -> None:
        """Use nodes no more for a while."""
        self._bad |= dict.fromkeys(node_ids, time.monotonic() + QUARANTINE_S)

    def quarantined(self) -> frozenset[str]:
        """The nodes not to use now."""
        self._bad = {node_id: until for node_id, until in self._bad.items() if until > time.monotonic()}
        return frozenset(self._bad)

    def variables(self, at: int, worker: int) -> Variables:
        """The environment of a host."""
        return host_environment(
            self.config,
            [lease.slice for lease in self.leases],
            at,
            worker,
            coordinators=[self._ports.coordinator(lease) for lease in self.leases],
            megascale=self._ports.megascale,
        )

    def slots(self) -> tuple[Slot, ...]:
        """Every host as a slot, slice by slice, in the order of the TPU worker ids."""
        with self._lock:
            return self._slots()

    def places(self, work: Work) -> list[list[Place]]:
        """Where some work goes: every host, a list per slice."""
        with self._lock:
            return places_of(work, self.config, self.leases, self.variables)

    def _slots(self) -> tuple[Slot, ...]:
        rows = [(at, worker, lease) for at, lease in enumerate(self.leases) for worker in range(lease.slice.num_hosts)]
        labels = {row["NodeID"]: row.get("Labels") or {} for row in self.head.ask(ray.nodes)}
        rank = {
            node: number
            for number, node in enumerate(dict.fromkeys(lease.slice.node_ids[worker] for _, worker, lease in rows))
        }
        seen = dict.fromkeys(rank, 0)
        slots = []
        for at, worker, lease in rows:
            node_id = lease.slice.node_ids[worker]
            slots.append(
                Slot(
                    placement_group=lease.group,
                    bundle_index=worker,
                    node_idx=at,
                    node_id=node_id,
                    node_ip=lease.slice.node_ips[worker],
                    node_rank=rank[node_id],
                    local_rank=seen[node_id],
                    labels=labels.get(node_id, {}),
                    worker_resources=self.config.request(lease.slice),
                    env={name: value for name, value in self.variables(at, worker).items() if value is not None},
                )
            )
            seen[node_id] += 1
        return tuple(slots)

    def give_back(self) -> bool:
        """Return slices and ports; whether Ray had the resources back in time. Can be repeated.

        When Ray's head does not answer, a warning names what is still held, and the next call tries again.
        """
        with self._lock:
            leases, self.leases = self.leases, []
            ports, self._ports = self._ports, Ports()
            if not ray.is_initialized():
                return True  # Ray ended, and with it everything that was held
            try:
                return self.head.ask(_give_back_all, leases, ports)
            except HeadUnreachableError as error:
                self.leases, self._ports = leases, ports
                names = ", ".join(lease.slice.slice_name for lease in leases) or "no slices"
                logger.warning(
                    "A closed pool still holds %s and their ports. Close it again when Ray's head answers. %s",
                    names,
                    error,
                )
                return False

    def leak(self) -> str:
        """Return what to say when the pool is dropped while it holds slices, or "" if it holds none."""
        if not self.leases or not ray.is_initialized():
            return ""
        return (
            f"A slice pool was dropped without close() while it held {len(self.leases)} slice(s). They are returned in "
            "the background. Use the pool in a with statement, or call close()."
        )


def _give_back_all(leases: Sequence[Lease], ports: Ports) -> bool:
    try:
        ports.release()
    finally:
        returned = give_back(leases)
    return returned
