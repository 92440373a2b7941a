# SPDX-License-Identifier: Apache-2.0
"""Which ranks have not begun a collective that others of their communicator wait in, by the numbers of collectives."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from .._model import Fleet, Record
from .positions import Position
from .waits import Graph

Records = Mapping[str, Record]


@dataclass(frozen=True)
class Mismatch:
    """Members of a communicator whose collectives differ.

    Attributes:
        behind: who has not begun the collective; of members in different ones with one number, those in the rarest.
        waiting: who waits in it.
        text: what those behind have not done, or which members are missing.
        blames: whether it follows that the others wait for those behind.
        record: of one that waits.
        since_s: for how long they stand, at least.
        kind: "missing" if a member is not there.
        moves: whether it is not known that they stand for long.
    """

    behind: tuple[str, ...]
    waiting: tuple[str, ...]
    text: str
    blames: bool
    record: Record
    since_s: float | None
    kind: Literal["mismatch", "missing"] = "mismatch"
    moves: bool = False


def find_mismatch(graph: Graph, fleet: Fleet, after_s: float) -> Mismatch | None:
    """Return the mismatch in a fleet whose members all stand in collectives or wait for a device; None without one.

    A member is blamed only if it waits in no collective itself, so that a chain of communicators leads to its end. Half
    of the members or more are not: one may have left a long computation early that the others are in.
    """
    at = {one.key: graph.positions.get(one.key, Position("unread")) for one in fleet.members}
    if (
        fleet.missing
        or fleet.disputed
        or any(one.kind not in ("collective", "device") or one.motion == "moving" for one in at.values())
    ):
        return None
    groups: dict[str, dict[str, Record]] = {}
    for key in at:
        for record in graph.processes[key].records:
            if _is_current(record, at[key], after_s):
                groups.setdefault(record.group, {})[key] = record
    # Who stands in code for collectives without an open one waits for something that is not recorded.
    busy = {key for key, one in at.items() if one.kind == "collective"}
    for there in groups.values():
        busy |= {key for key, one in there.items() if one.sends or (one.done is not None and one.begun > one.done)}
    counted = Counter(key for there in groups.values() for key, one in there.items() if one.done is None and one.begun)
    busy |= {key for key, times in counted.items() if times > 1}
    found = []
    for there in groups.values():
        first = next(iter(there.values()))
        if first.stood_s is None:
            found.append(
                _find_missing(there, at, after_s) if first.missing else _compare_counts(there, at, after_s, busy)
            )
        elif len(there) == first.size:
            found.append(_compare(there, busy))
    return max(filter(None, found), key=lambda one: (one.blames, len(one.waiting)), default=None)


def _is_current(record: Record, at: Position, after_s: float) -> bool:
    """Return whether a record of a process that stood for long holds now: it is new, or its thread never ran since."""
    if record.stood_s is None or record.stood_s < after_s:
        return record.stood_s is None
    rests = at.since_s is not None and at.since_s >= record.age_s and not at.busy_elsewhere
    return record.age_s <= after_s or rests


def _compare(there: Records, busy: set[str]) -> Mismatch | None:
    """Return the mismatch on one communicator, of which all records are there."""
    number = min(one.done or 0 for one in there.values()) + 1
    behind = tuple(key for key, one in there.items() if one.begun < number)
    waiting = tuple(key for key, one in there.items() if one.begun >= number > (one.done or 0))
    first = next((there[key] for key in waiting), None)
    if first is None:
        return None
    since_s = min((one.stood_s or 0.0) + one.age_s for one in there.values())
    if not behind:
        return _compare_operations(there, first, since_s)
    ends = tuple(key for key in behind if key not in busy)
    operation = first.operation if first.begun == number else "collective"
    text = f"has not begun {operation} {number} on communicator {first.group[:40]!r}, in which others wait"
    return Mismatch(ends or behind, waiting, text, 0 < 2 * len(ends) < len(there), first, since_s)


def _compare_operations(there: Records, first: Record, since_s: float) -> Mismatch | None:
    """Return the mismatch of members that have all begun the same number, of which none is the right one."""
    classes: dict[str, list[str]] = {}
    for key, one in there.items():
        classes.setdefault(one.operation, []).append(key)
    if len(classes) == 1 or len({one.begun for one in there.values()}) > 1:
        return None
    (rare, keys), *_, (common, waiting) = sorted(classes.items(), key=lambda one: (len(one[1]), one[0]))
    text = f"is in {rare} as number {first.begun} on communicator {first.group[:40]!r}, and others are in {common}"
    return Mismatch(tuple(keys), tuple(waiting), text, False, first, since_s)


def _compare_counts(there: Records, at: Mapping[str, Position], after_s: float, busy: set[str]) -> Mismatch | None:
    """Return the mismatch on a communicator of which only the numbers begun are known, by two equal answers of NCCL.

    A rank whose collectives are queued on its device may have begun more than another one, and one that uses several
    communicators may wait on another. So none is blamed unless all others have one number and wait for long.
    """
    low, size = min(one.begun for one in there.values()), next(iter(there.values())).size
    behind = tuple(key for key, one in there.items() if one.begun == low)
    waiting = tuple(key for key in there if key not in behind)
    if not waiting or len(there) != size:
        return None
    since_s = _waits_since(waiting, at)
    proven = since_s is not None and since_s >= after_s
    high = {there[key].begun for key in waiting}
    apart = not {at[key].where for key in behind} & {at[key].where for key in waiting}
    blames = proven and apart and len(high) == 1 and 2 * len(behind) < size and not busy & {*behind}
    text = f"has begun {low} collectives on communicator {there[behind[0]].group[:40]!r}, and others {max(high)}"
    return Mismatch(behind, waiting, text, blames, there[waiting[0]], since_s, moves=not proven)


def _find_missing(there: Records, at: Mapping[str, Position], after_s: float) -> Mismatch:
    record = next(iter(there.values()))
    since_s = _waits_since(tuple(there), at)
    proven = since_s is not None and since_s >= after_s
    names = ", ".join(f"rank {rank} ({who}{', dead' if dead else ''})" for rank, who, dead in record.missing[:8])
    text = f"does not reach {names} of communicator {record.group[:40]!r}"
    blames = proven and any(dead for *_, dead in record.missing)
    return Mismatch((), tuple(there), text, blames, record, since_s, "missing", not proven)


def _waits_since(keys: Collection[str], at: Mapping[str, Position]) -> float | None:
    """Return for how long all of these have waited; None if a thread spins, as in many waits for a device."""
    since = [at[key].since_s if at[key].motion == "still" else None for key in keys]
    known = [one for one in since if one is not None]
    return min(known) if known and len(known) == len(since) else None
