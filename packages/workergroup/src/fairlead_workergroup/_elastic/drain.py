# SPDX-License-Identifier: Apache-2.0
"""The watch for nodes that are about to end, which replaces the workers on them."""

import logging
import math
import time
import weakref

from .._membership.machine import Membership
from .._membership.roster import Roster
from .._observe.head import drain_deadlines
from .._world import Deadline
from .replace import Replace

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
# After a replacement that failed, for example because there is no room.
AGAIN_AFTER_S = 10.0


class DrainWatch:
    """Replaces the workers of nodes that Ray drains, as long as the group lives, which this does not keep alive."""

    def __init__(self, group: object, roster: Roster, membership: Membership, time_s: float) -> None:
        self._group = weakref.ref(group)
        self._roster = roster
        self._membership = membership
        self._time_s = time_s  # how long the start of other processes may take, also after the end of a node
        self._pause = Deadline.after(0.0)

    def is_left(self) -> bool:
        """Return whether the group lives."""
        return not (self._roster.end_begun.is_set() or self._roster.is_over or self._group() is None)

    def look(self) -> None:
        """Replace the workers of the nodes that drain now; after an error, wait a while before the next attempt."""
        if not (self._pause.passed and self.is_left()):
            return
        try:
            self._look()
        except Exception as error:  # noqa: BLE001  `Restart.method` may raise anything
            if not self._roster.is_over:
                logger.warning("Cannot replace the workers on draining nodes of %r: %s", self._roster, error)
            self._pause = Deadline.after(AGAIN_AFTER_S)

    def _look(self) -> None:
        at, members = drain_deadlines(), self._roster.now.members
        ends = {one.rank: at[one.slot.node_id] for one in members if one.slot.node_id in at}
        if not ends:
            return
        began, end = time.time(), min(ends.values())
        left = end - began
        try:
            # A node that is there after its time may stay for any time.
            notice = Deadline.after(left if 0 < left < math.inf else None)
            operation = Replace(tuple(sorted(ends)), notice, partly=True)
            self._membership.change(operation, Deadline.after(self._time_s))
        finally:
            if (late := time.time() - end) > 0 and not self._roster.is_over:
                logger.warning(
                    "The replacement of rank(s) %s of %r ended %.1f s after the time at which Ray was told that their "
                    "node would end; the notice left %.1f s. Shorten the calls, or keep a standby.",
                    ", ".join(map(str, ends)),
                    self._roster.name_prefix,
                    late,
                    max(0.0, left),
                )
