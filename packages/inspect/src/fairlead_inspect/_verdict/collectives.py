# SPDX-License-Identifier: Apache-2.0
"""Which ranks have not begun a collective that others of their communicator wait in, by the numbers of collectives."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Record, WorkerSet
from .positions import Position
from .waits import Graph


@dataclass(frozen=True)
class Mismatch:
    """Members of a communicator whose collectives differ."""

    behind: tuple[str, ...]  # who has not begun the collective; of different ones with one number, who is in the rarest
    waiting: tuple[str, ...]  # who waits in it
    text: str  # what those behind have not done
    blames: bool  # whether it follows that the others wait for those behind
    record: Record  # of a member that waits
    since_s: float  # for how long they stand, at least


def find_mismatch(graph: Graph, workers: WorkerSet, after_s: float) -> Mismatch | None:
    """Return the mismatch in a worker set whose members all stand in collectives or wait for a device, or None.

    A member is blamed only if it waits in no collective itself, so that a chain of communicators leads to its end. Half
    of the members or more are not: one may have left a long computation early that the others are in.
    """
    at = {member.key: graph.positions.get(member.key, Position("unread")) for member in workers.members}
    if (
        workers.missing
        or workers.disputed
        or any(place.kind not in ("collective", "device") or place.motion == "moving" for place in at.values())
    ):
        return None
    groups: dict[str, dict[str, Record]] = {}
    for key in at:
        for record in graph.processes[key].records:
            # A record of a process that stood for long holds now if it is new, or its thread has not run since.
            rests = (at[key].since_s or 0.0) >= record.age_s and not at[key].busy_elsewhere
            if record.stood_s >= after_s and (record.age_s <= after_s or rests):
                groups.setdefault(record.group, {})[key] = record
    # Who stands in code for collectives without an open one waits for something that is not recorded.
    busy = {key for key, place in at.items() if place.kind == "collective"}
    for records in groups.values():
        busy |= {key for key, record in records.items() if record.sends or record.begun > record.done}
    found = [_compare(group, busy) for group in groups.values() if len(group) == next(iter(group.values())).size]
    return max(filter(None, found), key=lambda odd: (odd.blames, len(odd.waiting)), default=None)


def _compare(records: Mapping[str, Record], busy: set[str]) -> Mismatch | None:
    """Return the mismatch on one communicator, of which all records are known."""
    number = min(record.done for record in records.values()) + 1
    behind = tuple(key for key, record in records.items() if record.begun < number)
    waiting = tuple(key for key, record in records.items() if record.begun >= number > record.done)
    first = next((records[key] for key in waiting), None)
    if first is None:
        return None
    since_s = min(record.stood_s + record.age_s for record in records.values())
    if not behind:
        return _compare_operations(records, first, since_s)
    ends = tuple(key for key in behind if key not in busy)
    operation = first.operation if first.begun == number else "collective"
    text = f"has not begun {operation} {number} on communicator {first.group[:40]!r}, in which others wait"
    return Mismatch(ends or behind, waiting, text, 0 < 2 * len(ends) < len(records), first, since_s)


def _compare_operations(records: Mapping[str, Record], first: Record, since_s: float) -> Mismatch | None:
    """Return the mismatch of members that have all begun the same number, of which none is the right one."""
    classes: dict[str, list[str]] = {}
    for key, record in records.items():
        classes.setdefault(record.operation, []).append(key)
    if len(classes) == 1 or len({record.begun for record in records.values()}) > 1:
        return None
    (rare, keys), *_, (common, waiting) = sorted(classes.items(), key=lambda pair: (len(pair[1]), pair[0]))
    text = f"is in {rare} as number {first.begun} on communicator {first.group[:40]!r}, and others are in {common}"
    return Mismatch(tuple(keys), tuple(waiting), text, False, first, since_s)
