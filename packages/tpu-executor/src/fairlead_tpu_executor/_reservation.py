# SPDX-License-Identifier: Apache-2.0
"""The slices of a pool and their ports: several slices or none, replaced one by one, and given back together."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from fairlead_placement import HeadTimeoutError, PlacementError, PortUnavailableError, extension

from ._config import AcceleratorConfigType
from ._groups import Demand
from ._leases import Held, Lease, find_lost, give_back, lease_megascale, megascale_port, release, take
from ._slices import SliceInfo
from .exceptions import InsufficientSlicesError, TpuExecutorError

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_POLL_S = (0.05, 1.0)
# Seconds after the timeout in which another driver may still take a free slice first.
_RACES_S = 5.0
# A request that Ray's head does not answer may hold the lock of a reservation.
_CLOSE_S = 60.0


class Reservation:
    """The one owner of what a pool holds. A finalizer keeps it alive, and not the pool itself.

    Attributes:
        sizes: the allowed numbers of slices, ascending.
        taken: how many slices were taken so far, including replacements.
        epoch: how often the reservation was closed. What began in an earlier epoch ends with an error.
        held: the leases of the slices and ports, as one value.
        dead: nodes that a task has reported dead, perhaps long before Ray's head does; they are not used any more.
        doubtful: nodes whose accelerators did not start twice in a row. Slices without them are preferred.
    """

    def __init__(self, config: AcceleratorConfigType) -> None:
        self.config = config
        self.sizes: Sequence[int] = config.sizes
        self.taken = self.epoch = 0
        self.held = Held()
        self.dead: set[str] = set()
        self.doubtful: set[str] = set()
        # Whoever takes or returns slices or ports has it until `held` shows that.
        self._lock = threading.RLock()

    def ensure(self, epoch: int) -> Held:
        """Hold healthy slices, keep those that are held, and replace lost ones; after an error nothing is held."""
        with self._lock:
            before = self.held.leases
            try:
                self._check_open(epoch)
                # First, because it may be refused, and slices may come after hours.
                port = megascale_port(self.config, os.environ) if self.sizes[-1] > 1 else None
                lost = 0
                for is_last in (False, False, True):
                    lost += self._give_back_lost()
                    if len(self.held.leases) != self.sizes[-1]:
                        self._scale(lost, epoch)
                    if self._hold_megascale(port, epoch, is_last=is_last):
                        break
                self._check_open(epoch)  # A signal handler may have closed the pool.
            except BaseException as error:
                self.give_back(1.0 if isinstance(error, HeadTimeoutError) else None)
                raise
            self.taken += sum(lease not in before for lease in self.held.leases)
            return self.held

    def start(self, epoch: int, start: Callable[[], _T]) -> _T:
        """Start something on what is held. Ray would never end a task that comes after the end of its group."""
        with self._lock:
            self._check_open(epoch)
            return start()

    def _check_open(self, epoch: int) -> None:
        if self.epoch != epoch:
            raise TpuExecutorError("The pool was closed while it was in use. Use a pool that stays open.")

    def _give_back_lost(self) -> int:
        """Give back slices that are lost, and doubtful ones for which there are others; return their number."""
        held = self.held.leases
        with extension.head_deadline():
            lost = find_lost(held, self.dead) if held else []
        if doubtful := [lease for lease in held if lease not in lost and self._is_doubtful(lease.slice)]:
            others = [place for place in self._survey()[0] if not self._is_doubtful(place)]
            lost += doubtful[: len(others)]
        self._drop(lost)
        return len(lost)

    def _drop(self, leases: Sequence[Lease]) -> None:
        if leases:
            self.held = replace(self.held, leases=tuple(lease for lease in self.held.leases if lease not in leases))
            with extension.head_deadline():
                give_back(leases)

    def _is_doubtful(self, place: SliceInfo) -> bool:
        return not self.doubtful.isdisjoint(place.node_ids)

    def _survey(self) -> tuple[list[SliceInfo], dict[str, str]]:
        """Read the nodes once, and return which slices are free and not held, and why the others are not free."""
        with extension.head_deadline():
            nodes = {node.node_id: node for node in extension.read_nodes() if node.node_id not in self.dead}
        free: list[SliceInfo] = []
        lacking: dict[str, str] = {}
        for name, place in self.config.find([*nodes.values()]).items():
            if name in [held.slice_name for held in self.held.slices]:
                continue
            if isinstance(place, str):
                lacking[name] = place
                continue
            hosts = [(self.config.bundle(place, worker), node_id) for worker, node_id in enumerate(place.node_ids)]
            room = [extension.count_bundles(bundle, nodes[node_id].free) for bundle, node_id in hosts]
            if all(room):
                free.append(place)
            else:
                busy = ", ".join(str(worker) for worker, count in enumerate(room) if not count)
                lacking[name] = f"somebody else uses worker {busy}"
        return sorted(free, key=self._is_doubtful), lacking

    def _scale(self, lost: int, epoch: int) -> None:
        """Hold an allowed number of slices, including those that are held, after `lost` were lost.

        Nothing more is taken while it waits: two jobs that each hold a part of what both need would wait forever.
        """
        config, sizes, held = self.config, self.sizes, len(self.held.leases)
        any_s = config.replace_timeout_s if lost else 0.0 if held in sizes else config.scale_timeout_s
        largest_s = min(any_s, config.scale_timeout_s)
        began, pause, demand = time.monotonic(), _POLL_S[0], Demand(config)
        with extension.Waiting(f"Waiting for {sizes[-1]} x {config.kind}") as waiting:
            try:
                while True:
                    self._check_open(epoch)
                    waited = time.monotonic() - began
                    free, lacking = self._survey()
                    size = choose_size(sizes, held + len(free), waited_out=waited >= largest_s)
                    if size is None:
                        demand.show(sizes[-1] - held - len(free))
                    elif self._change_size(size, free, is_last=waited >= any_s + _RACES_S):
                        return
                    if waited >= any_s + (0 if size is None else _RACES_S):
                        raise InsufficientSlicesError(config.kind, tuple(sizes), held + len(free), lacking, waited)
                    waiting.show(f"{held} held, {len(free)} free; others: {', '.join(lacking) or 'none'}", any_s)
                    nearest = largest_s if waited < largest_s else any_s
                    time.sleep(max(0.01, min(pause, began + nearest - time.monotonic())))
                    pause = min(2 * pause, _POLL_S[1])
            finally:
                demand.withdraw()

    def _change_size(self, size: int, free: Sequence[SliceInfo], *, is_last: bool) -> bool:
        """Hold `size` slices; return False, with the same held as before, if somebody else was faster."""
        held = self.held.leases
        chosen = free[: max(0, size - len(held))]
        try:
            with extension.head_deadline():
                taken = take(self.config, chosen) if chosen else []
        except PlacementError as error:
            self._doubt(chosen, error, is_last=is_last)
            return False
        if taken is None:
            return False
        self._drop(held[size:])
        self.held = replace(self.held, leases=(*held[:size], *taken))
        return True

    def _doubt(self, slices: Sequence[SliceInfo], error: PlacementError, *, is_last: bool) -> None:
        """Prefer other slices than these, on which no ports could be leased; raise the error if that does not help.

        Most likely a host is lost, and Ray does not know yet.
        """
        if is_last or isinstance(error, HeadTimeoutError | PortUnavailableError):
            raise error
        logger.info("Slices could not be taken: %s", error)
        self.doubtful.update(place.node_ids[0] for place in slices)

    def _hold_megascale(self, port: int | None, epoch: int, *, is_last: bool) -> bool:
        """Hold the port of the coordinator of several slices, on worker 0 of the first one, if there are several.

        Returns False, without that slice, if its worker 0 seems to be lost.
        """
        leases, megascale = self.held.leases, self.held.megascale
        wanted = (leases[0].slice.node_ids[0], port) if port is not None and len(leases) > 1 else None
        if wanted == (megascale and (megascale.node_id, megascale.port)):
            return True
        self.held = replace(self.held, megascale=None)
        with extension.head_deadline():
            release(megascale)
        if wanted and port is not None:
            try:
                leased = lease_megascale(leases[0], port, lambda: self._check_open(epoch))
            except PlacementError as error:
                self._doubt([leases[0].slice], error, is_last=is_last)
                self._drop(leases[:1])
                return False
            self.held = replace(self.held, megascale=leased)
        return True

    def close(self) -> bool:
        self.epoch += 1
        return self.give_back()

    def give_back(self, timeout_s: float | None = None) -> bool:
        """Return slices and ports, and whether Ray had the resources before its head's deadline."""
        if not self._lock.acquire(timeout=_CLOSE_S):
            logger.warning("A pool does not give its slices back, because Ray's head does not answer. Close it again.")
            return False
        try:
            held, self.held = self.held, Held()
            # If Ray has ended, so has everything that was held.
            if not held.leases or not extension.connection():
                return True
            with extension.head_deadline(timeout_s):
                return give_back(held.leases, held.megascale)
        except HeadTimeoutError as error:
            names = ", ".join(place.slice_name for place in held.slices)
            logger.warning("%s will be returned when Ray's head answers. %s", names, error)
            return False
        finally:
            self._lock.release()

    def describe_leak(self) -> str:
        """Return the warning about a pool that was dropped; empty if it holds nothing."""
        count = len(self.held.leases) if extension.connection() else 0
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
