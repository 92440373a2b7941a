# SPDX-License-Identifier: Apache-2.0
"""The slices of a pool and their ports, held together and given back together."""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from fairlead_placement.extension import Waiting, connection

from .._accelerators.config import AcceleratorConfigType
from .._health import Head
from ..exceptions import HeadUnreachableError, InsufficientSlicesError, TpuExecutorError
from .leases import Held, HostLostError, find_lost, give_back, megascale_port, release, replace_megascale, take
from .scaling import choose_size, choose_waits, show_missing, survey, withdraw

logger = logging.getLogger(__name__)
# A chip that is stuck may work again later: its VM is repaired, or the process that held the chip ends.
_QUARANTINE_S = 300.0
_POLL_S = (0.05, 1.0)
# Seconds after the timeout in which another driver may still take a free slice first.
_RACES_S = 5.0


class Reservation:
    """The one owner of what a pool holds. A finalizer keeps it alive, and not the pool itself."""

    def __init__(self, config: AcceleratorConfigType) -> None:
        self.config = config
        self.head = Head(config.head_timeout_s)
        self.sizes: Sequence[int] = config.sizes  # the allowed numbers of slices, ascending
        self.taken = 0  # slices taken so far, replacements included
        self.epoch = 0  # how often the reservation was closed
        self.held = Held()
        # By the node and the reason.
        self._quarantined_until: dict[tuple[str, str], float] = {}
        # Whoever takes or returns slices or ports has it until `held` shows that. Reentrant: a signal handler may close
        # the pool in the middle of anything.
        self._lock = threading.RLock()

    def ensure(self, check_open: Callable[[], None] | None = None) -> Held:
        """Hold healthy slices, those that are held first; after an error nothing is, unless the head was silent."""
        check_open = check_open or functools.partial(self.check_open, self.epoch)
        with self._lock:
            check_open()
            before = self.held.leases
            lost = self._give_back_lost()
            try:
                # First, because it may be refused, and slices may come after hours.
                port = megascale_port(self.config, os.environ) if self.sizes[-1] > 1 else None
                while not self._fill(lost, port, check_open):
                    lost += self._give_back_lost()
                check_open()  # A signal handler may have closed the pool, and given back what was held until then.
            except BaseException:
                self.give_back()
                raise
            self.taken += sum(lease not in before for lease in self.held.leases)
            return self.held

    def _give_back_lost(self) -> int:
        """Give back the slices that are lost, and return their number."""
        held = self.held.leases
        if lost := self.head.call(find_lost, held, self._quarantined()) if held else []:
            self.held = replace(self.held, leases=tuple(lease for lease in held if lease not in lost))
            self.head.call(give_back, lost)
        return len(lost)

    def _fill(self, lost: int, port: int | None, check_open: Callable[[], None]) -> bool:
        """Hold an allowed number of slices and their ports; return False if a host is lost while it is taken."""
        try:
            if len(self.held.leases) != self.sizes[-1]:
                self._scale(lost, check_open)
            self._hold_megascale(port)
        except HostLostError as error:
            # Ray may notice the loss of a host much later.
            self.quarantine(dict.fromkeys(error.node_ids, "it was lost while it was taken"))
            return False
        return True

    def _scale(self, lost: int, check_open: Callable[[], None]) -> None:
        """Hold an allowed number of slices, including those that are held, after `lost` were lost."""
        config, sizes, held = self.config, self.sizes, self.held.leases
        largest_s, any_s = choose_waits(
            sizes, len(held), lost, scale_s=config.scale_timeout_s, replace_s=config.replace_timeout_s
        )
        began = time.monotonic()
        pause = _POLL_S[0]
        shown: list[PlacementGroup] = []  # to an autoscaler
        with Waiting(f"Waiting for {sizes[-1]} x {config.kind}") as waiting, contextlib.ExitStack() as stack:
            stack.callback(withdraw, config, shown, self.head)
            # Nothing more is taken while it waits: two jobs that each hold a part of what both need would wait forever.
            while True:
                check_open()
                present = self.head.call(survey, config, self.held.slices, self._quarantined())
                free, lacking = present.intact, present.lacking
                waited = time.monotonic() - began
                size = choose_size(sizes, len(held), len(free), waited_out=waited >= largest_s)
                if size is not None:
                    withdraw(config, shown, self.head)
                    wanted = free[: max(0, size - len(held))]
                    taken = self.head.call(take, config, wanted, undo=give_back) if wanted else []
                    if taken is not None:
                        if held[size:]:
                            self.head.call(give_back, held[size:])
                        self.held = replace(self.held, leases=(*held[:size], *taken))
                        return
                    # Somebody else was faster, so the nodes are read again.
                if waited >= any_s + (0 if size is None else _RACES_S):
                    raise InsufficientSlicesError(config.kind, tuple(sizes), len(held) + len(free), lacking, waited)
                self.head.call(show_missing, config, shown, sizes[-1] - len(held) - len(free))
                counts = f"{len(held)} held, {len(free)} free"
                waiting.show("; ".join([counts, *map(str, lacking[:2])]), any_s)
                nearest = largest_s if waited < largest_s else any_s
                time.sleep(max(0.01, min(pause, began + nearest - time.monotonic())))
                pause = min(2 * pause, _POLL_S[1])

    def _hold_megascale(self, port: int | None) -> None:
        """Hold the port of the coordinator of several slices, on worker 0 of the first one, if there are several."""
        held = self.held
        port = port if len(held.leases) > 1 else None
        wanted = None if port is None else (held.leases[0].slice.node_ids[0], port)
        if wanted == (held.megascale and (held.megascale.node_id, held.megascale.port)):
            return
        self.held = replace(held, megascale=None)  # Until it finishes, the request owns both ports.
        self.held = replace(held, megascale=self.head.call(replace_megascale, held, port, undo=release))

    def check_open(self, epoch: int, doing: str = "it was in use") -> None:
        if self.epoch != epoch:
            raise TpuExecutorError(f"The pool was closed while {doing}. Use a pool that stays open.")

    def quarantine(self, reasons: Mapping[str, str], settled: Collection[str] = ()) -> None:
        """Do not use these nodes for some minutes, each for its reason; those with a settled reason may be used."""
        kept = {key: until for key, until in self._quarantined_until.items() if key[1] not in settled}
        self._quarantined_until = kept | dict.fromkeys(reasons.items(), time.monotonic() + _QUARANTINE_S)

    def _quarantined(self) -> frozenset[str]:
        now = time.monotonic()
        return frozenset(node_id for (node_id, _), until in self._quarantined_until.items() if until > now)

    def close(self) -> bool:
        self.epoch += 1
        return self.give_back()

    def give_back(self) -> bool:
        """Return slices and ports, and whether Ray had the resources in time; the next call tries again."""
        with self._lock:
            held, self.held = self.held, Held()
            # If Ray has ended, so has everything that was held.
            if not held.leases or not connection():
                return True
            try:
                return self.head.call(give_back, held.leases, held.megascale)
            except HeadUnreachableError as error:
                self.held = held
                logger.warning(
                    "A closed pool still holds %s and their ports. Close it again when Ray's head answers. %s",
                    ", ".join(one.slice_name for one in held.slices),
                    error,
                )
                return False

    def describe_leak(self) -> str:
        if not self.held.leases or not connection():
            return ""
        return (
            f"A slice pool was dropped without close() while it held {len(self.held.leases)} slice(s). They are "
            "returned in the background. Use the pool in a with statement, or call close()."
        )
