# SPDX-License-Identifier: Apache-2.0
"""The phases of a group's membership, and which may follow which."""

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    """A phase of a group's membership."""

    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    PREPARING = "preparing a change"
    QUIESCING = "waiting for calls before a change"
    SWITCHING = "replacing processes"
    DELIVERING = "delivering facts"
    BROKEN = "broken"
    ENDING = "ending"
    ENDED = "ended"


AT_REST = frozenset({Phase.SERVING, Phase.BROKEN})
# Each phase may be followed by these, and any phase but the last by ENDING.
LEGAL: Mapping[Phase, frozenset[Phase]] = {
    Phase.NEW: frozenset({Phase.STARTING}),
    Phase.STARTING: frozenset({Phase.SERVING}),
    Phase.SERVING: frozenset({Phase.PREPARING}),
    Phase.BROKEN: frozenset({Phase.PREPARING}),
    Phase.PREPARING: AT_REST | {Phase.QUIESCING},
    Phase.QUIESCING: AT_REST | {Phase.SWITCHING},
    Phase.SWITCHING: AT_REST | {Phase.DELIVERING},
    Phase.DELIVERING: AT_REST,
    Phase.ENDING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
