# SPDX-License-Identifier: Apache-2.0
"""Counts the worker groups in each slot, so that one group too many is refused instead of pending forever.

The count is per driver. Ray keeps an actor pending, without an error, if its bundle has no room.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._slot import Slot
from ..exceptions import ResourceInsufficientError

_Key = tuple[str, int]
_held: dict[_Key, dict["SlotClaim", None]] = {}
# For all claims. Reentrant: a signal handler may shut a group down in the middle of anything.
_lock = threading.RLock()


@dataclass(eq=False, repr=False)
class SlotClaim:
    """A worker group's right to run in a set of slots. `claim_slots` creates it; `release` ends it.

    Attributes:
        holder: the name of the group, for messages.
    """

    holder: str
    _keys: frozenset[_Key]
    # Weak: the registration must not keep a dropped group alive.
    _group: Callable[[], object | None]

    def release(self) -> None:
        """Release the slots. Can be repeated."""
        with _lock:
            for key in self._keys:
                claims = _held.get(key, {})
                claims.pop(self, None)
                if not claims:
                    _held.pop(key, None)


def claim_slots(slots: Sequence[Slot], holder: str, *, group: object | None = None) -> SlotClaim:
    """Register `holder` in every slot, or in none.

    Args:
        slots: where its workers will run. A slot may appear several times.
        holder: the name that is shown if another group is refused.
        group: the object to draw in the cluster's grid. It has `name_prefix`, `world_size` and `worker_metadata`.

    Raises:
        ResourceInsufficientError: a slot is full. The message names its holders.
    """
    reference = (lambda: None) if group is None else weakref.ref(group)
    claim = SlotClaim(holder, frozenset(slot.key for slot in slots), reference)
    with _lock:
        for slot in slots:
            claims = _held.get(slot.key, {})
            if len(claims) >= slot.capacity:
                names = ", ".join(repr(other.holder) for other in claims)
                is_single = slot.capacity == 1
                # `enable_colocation` makes room for two groups. It changes nothing if there is room for more.
                wider = "enable_colocation=True" if is_single else f"max_colocated_worker_groups={slot.capacity + 1}"
                raise ResourceInsufficientError(
                    f"{holder!r} cannot run in bundle {slot.bundle_index} of logical node {slot.node_idx}: the "
                    f"bundle has room for {slot.capacity} worker group{'' if is_single else 's'}, and {names} "
                    f"{'is' if is_single else 'are'} there. Shut {names if is_single else 'one of them'} down, or "
                    f"reserve the cluster with {wider}. A group that the program dropped ends soon: try again."
                )
        for key in claim._keys:
            _held.setdefault(key, {})[claim] = None
    return claim


def groups_on(slots: Sequence[Slot]) -> list[Any]:
    """Return the groups registered on any of the slots, in the order of the slots and of the claims on each."""
    with _lock:
        groups = [claim._group() for slot in slots for claim in _held.get(slot.key, ())]
    return [*{id(group): group for group in groups if group is not None}.values()]
