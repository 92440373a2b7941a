# SPDX-License-Identifier: Apache-2.0
"""The watch for nodes that are about to end, which replaces the workers on them."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from fairlead_placement.spi import block_shutdown, draining_nodes, never_connect

from .._members import Roster

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
# After a replacement that failed, for example because there is no room.
AGAIN_AFTER_S = 10.0


class DrainWatch:
    """Replace the workers of nodes that Ray drains, on a thread that ends with the group.

    Args:
        group: the group, which the thread does not keep alive.
        roster: its roster.
        replace: replaces ranks of the group that it is given.
    """

    def __init__(self, group: object, roster: Roster, replace: Callable[[Any, Sequence[int]], object]) -> None:
        self._end = threading.Event()
        self._group = weakref.ref(group, lambda _: self._end.set())
        self._roster = roster
        self._replace = replace
        threading.Thread(target=self._run, name="fairlead-drain", daemon=True).start()

    def _run(self) -> None:
        never_connect()
        pause = LOOK_EVERY_S
        while not self._end.wait(pause) and not self._roster.ending:
            pause = LOOK_EVERY_S
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  `on_handover` may raise anything
                if not self._roster.ending:
                    logger.warning("Cannot replace the workers on draining nodes of %r: %s", self._roster, error)
                pause = AGAIN_AFTER_S

    def _look(self) -> None:
        ranks, group = self._find_ranks(), self._group()
        if ranks and group is not None:
            self._replace(group, ranks)

    def _find_ranks(self) -> list[int]:
        """Return the ranks on nodes that are draining."""
        with block_shutdown():
            if self._roster.ending or not self._roster.connected:
                self._end.set()
                return []
            draining = draining_nodes()
        return [member.rank for member in self._roster.snapshot().members if member.slot.node_id in draining]
