# SPDX-License-Identifier: Apache-2.0
"""The slices of a pool and their ports: several slices or none, replaced one by one, and given back together."""

import logging
import threading
import time
from collections.abc import Sequence

from fairlead_placement import HeadTimeoutError, PlacementError, PortUnavailableError, extension

from ._config import AcceleratorConfigType
from ._leases import Demand, Lease, give_back, is_intact, take
from ._slices import SliceInfo
from .exceptions import InsufficientSlicesError, TpuExecutorError

logger = logging.getLogger(__name__)
_POLL_S = (0.05, 1.0)
# Seconds after the timeout in which another driver may still take a free slice first.
_RACES_S = 5.0


class Reservation:
    """The one owner of what a pool holds. A finalizer keeps it alive, and not the pool itself.

    Attributes:
        sizes: the allowed numbers of slices, ascending.
        is_open: False after the pool was closed, until its next use begins.
        leases: the slices that are held, with their ports. A change makes a new value.
        dead: nodes that a task has reported dead, perhaps long before Ray's head does; they are not used any more.
        doubtful: nodes that failed to start something. Their slices are given back, and others are preferred.
    """

    def __init__(self, config: AcceleratorConfigType) -> None:
        self.config = config
        self.sizes: Sequence[int] = config.sizes
        self.is_open = True
        self.leases: tuple[Lease, ...] = ()
        self.dead: set[str] = set()
        self.doubtful: set[str] = set()
        # Whoever takes or returns slices or ports has it until `leases` shows that.
        self._lock = threading.RLock()

    def ensure(self) -> tuple[Lease, ...]:
        """Hold healthy slices, keep those that are held, and replace lost ones; after an error nothing is held."""
        with self._lock:
            try:
                lost = self._give_back_lost()
                if len(self.leases) != self.sizes[-1]:
                    self._scale(lost)
                self.check_open()  # A signal handler may have closed the pool.
            except BaseException as error:
                self.give_back(1.0 if isinstance(error, HeadTimeoutError) else None)
                raise
            return self.leases

    def check_open(self) -> None:
        """Raise a TpuExecutorError if the pool was closed since its current use began."""
        if not self.is_open:
            raise TpuExecutorError("The pool was closed while it was in use. Use a pool that stays open.")

    def _give_back_lost(self) -> int:
        """Give back slices that are lost or doubtful, and return their number. A doubtful one may be taken again."""
        if not self.leases:
            return 0
        with extension.head_deadline():
            usable = {node.node_id for node in extension.read_nodes(with_free=False)} - self.dead - self.doubtful
            lost = [
                lease
                for lease in self.leases
                if not usable.issuperset(lease.slice.node_ids) or not is_intact(lease.group)
            ]
        self._drop(lost)
        return len(lost)

    def _drop(self, leases: Sequence[Lease]) -> None:
        if leases:
            self.leases = tuple(lease for lease in self.leases if lease not in leases)
            with extension.head_deadline():
                give_back(leases)

    def _survey(self) -> tuple[list[SliceInfo], dict[str, str]]:
        """Read the nodes once, and return which slices are free and not held, and why the others are not free."""
        with extension.head_deadline():
            nodes = {node.node_id: node for node in extension.read_nodes() if node.node_id not in self.dead}
        free: list[SliceInfo] = []
        lacking: dict[str, str] = {}
        held = {lease.slice.slice_name for lease in self.leases}
        for name, place in self.config.find([*nodes.values()]).items():
            if name in held:
                continue
            if isinstance(place, str):
                lacking[name] = place
                continue
            bundles = [(self.config.bundle(place, worker), node_id) for worker, node_id in enumerate(place.node_ids)]
            room = [extension.count_bundles(bundle, nodes[node_id].free) for bundle, node_id in bundles]
            if all(room):
                free.append(place)
            else:
                busy = ", ".join(str(worker) for worker, count in enumerate(room) if not count)
                lacking[name] = f"somebody else uses worker {busy}"
        return sorted(free, key=lambda place: not self.doubtful.isdisjoint(place.node_ids)), lacking

    def _scale(self, lost: int) -> None:
        """Hold an allowed number of slices, including those that are held, after `lost` were lost.

        Nothing more is taken while it waits: two jobs that each hold a part of what both need would wait forever.
        """
        config, sizes = self.config, self.sizes
        any_s = config.scale_timeout_s
        if lost:
            any_s = config.replace_timeout_s
        elif len(self.leases) in sizes:
            any_s = 0.0
        largest_s = min(any_s, config.scale_timeout_s)
        began, pause, demand = time.monotonic(), _POLL_S[0], Demand(config)
        with extension.Waiting(f"Waiting for {sizes[-1]} x {config.kind}") as waiting:
            try:
                while True:
                    self.check_open()
                    waited = time.monotonic() - began
                    free, lacking = self._survey()
                    held = len(self.leases)
                    size = choose_size(sizes, held + len(free), waited_out=waited >= largest_s)
                    if size is None:
                        demand.update(sizes[-1] - held)
                    else:
                        demand.withdraw()  # Ray would place it on the slices that are to be taken.
                        if self._change_size(size, free):
                            return
                    if waited >= any_s + (0 if size is None else _RACES_S):
                        raise InsufficientSlicesError(config.kind, tuple(sizes), held + len(free), lacking, waited)
                    waiting.show(f"{held} held, {len(free)} free; others: {', '.join(lacking) or 'none'}", any_s)
                    nearest = largest_s if waited < largest_s else any_s
                    time.sleep(max(0.01, min(pause, began + nearest - time.monotonic())))
                    pause = min(2 * pause, _POLL_S[1])
            finally:
                demand.withdraw()

    def _change_size(self, size: int, free: Sequence[SliceInfo]) -> bool:
        """Hold `size` slices.

        Returns False if somebody else was faster, or if a host of a new slice seems to be lost before Ray knows: other
        slices are preferred then.
        """
        chosen = free[: max(0, size - len(self.leases))]
        try:
            taken = take(self.config, chosen) if chosen else []
        except (HeadTimeoutError, PortUnavailableError):
            raise
        except PlacementError as error:
            logger.info("Slices could not be taken: %s", error)
            self.doubtful.update(place.node_ids[0] for place in chosen)
            return False
        if taken is None:
            return False
        self._drop(self.leases[size:])
        self.leases = (*self.leases, *taken)
        return True

    def close(self) -> bool:
        self.is_open = False
        return self.give_back()

    def give_back(self, timeout_s: float | None = None) -> bool:
        """Return slices and ports, and whether Ray had the resources before its head's deadline."""
        with self._lock:
            leases, self.leases = self.leases, ()
            # If Ray has ended, so has everything that was held.
            if not leases or not extension.connection():
                return True
            try:
                with extension.head_deadline(timeout_s):
                    return give_back(leases)
            except HeadTimeoutError as error:
                names = ", ".join(lease.slice.slice_name for lease in leases)
                logger.warning("%s will be returned when Ray's head answers. %s", names, error)
                return False

    def describe_leak(self) -> str:
        """Return the warning about a pool that was dropped; empty if it holds nothing."""
        count = len(self.leases) if extension.connection() else 0
        if not count:
            return ""
        return (
            f"A slice pool was dropped without close() while it held {count} slice(s). They are returned in the "
            "background. Use the pool in a with statement, or call close()."
        )


def choose_size(sizes: Sequence[int], present: int, *, waited_out: bool) -> int | None:
    """Return how many slices to hold now; None means to wait for the largest allowed number. Pure."""
    possible = [size for size in sizes if size <= present]
    return possible[-1] if possible and (possible[-1] == sizes[-1] or waited_out) else None
