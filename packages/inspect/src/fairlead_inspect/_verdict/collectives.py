# SPDX-License-Identifier: Apache-2.0
"""Which ranks have not begun a collective that others of their communicator wait in, by the numbers of collectives."""

from collections.abc import Collection, Mapping

from ..model import Evidence, Finding, Record, WorkerSet
from .case import Case
from .waits import Wait


def find_mismatches(case: Case, explained: Collection[str]) -> tuple[list[Finding], set[str]]:
    """Name the ranks that are behind in worker sets whose members all stand in collectives or wait for a device.

    One is blamed only if it waits in no collective itself, so that a chain of communicators leads to its end. Half
    of the members or more are not: one may have left a long computation early that the others are in. Return also
    the members of these sets.
    """
    findings, explains = list[Finding](), set[str]()
    for workers in case.graph.worker_sets:
        members = {member.key for member in workers.members}
        if members.isdisjoint(explained) and (finding := _find_mismatch(case, workers)) is not None:
            findings.append(finding)
            explains |= members
    return findings, explains


def _find_mismatch(case: Case, workers: WorkerSet) -> Finding | None:
    places = {member.key: case.at(member.key) for member in workers.members}
    if (
        workers.missing
        or workers.disputed
        or any(place.kind not in ("collective", "device") or place.motion == "moving" for place in places.values())
    ):
        return None
    groups: dict[str, dict[str, Record]] = {}
    for key in places:
        for record in case.graph.processes[key].records:
            # A record of a process that stood for long holds now if it is new, or its thread has not run since.
            rests = (places[key].since_s or 0.0) >= record.age_s and not places[key].busy_elsewhere
            if record.stood_s >= case.after_s and (record.age_s <= case.after_s or rests):
                groups.setdefault(record.group, {})[key] = record
    # Who stands in code for collectives without an open one waits for something that is not recorded.
    busy = {key for key, place in places.items() if place.kind == "collective"}
    for records in groups.values():
        busy |= {key for key, record in records.items() if record.sends or record.begun > record.done}
    whole = (group for group in groups.values() if len(group) == next(iter(group.values())).size)
    compared = [_compare(case, workers, group, busy) for group in whole]
    return max(filter(None, compared), key=lambda odd: (odd.blames, odd.waiting.count), default=None)


def _compare(case: Case, workers: WorkerSet, records: Mapping[str, Record], busy: set[str]) -> Finding | None:
    """Return the mismatch on one communicator, of which all records are known."""
    number = min(record.done for record in records.values()) + 1
    behind = [key for key, record in records.items() if record.begun < number]
    waiting = [key for key, record in records.items() if record.begun >= number > record.done]
    if not waiting:
        return None
    first = records[waiting[0]]
    ends = [key for key in behind if key not in busy]
    operation = first.operation if first.begun == number else "collective"
    text = f"has not begun {operation} {number} on communicator {first.group[:40]!r}, in which others wait"
    if not behind:
        # Of different operations with one number, none is the right one; the rarest is named.
        classes: dict[str, list[str]] = {}
        for key, record in records.items():
            classes.setdefault(record.operation, []).append(key)
        if len(classes) == 1 or len({record.begun for record in records.values()}) > 1:
            return None
        (rare, behind), *_, (common, waiting) = sorted(classes.items(), key=lambda pair: (len(pair[1]), pair[0]))
        text = f"is in {rare} as number {first.begun} on communicator {first.group[:40]!r}, and others are in {common}"
    named = ends or behind
    fact = Evidence(first.source, f"{len(waiting)} of {first.size} members wait, {len(named)} differ", first.age_s)
    since_s = min(record.stood_s + record.age_s for record in records.values())
    wait = Wait("collective", tuple(waiting), tuple(named), workers=workers)
    blames = 0 < 2 * len(ends) < len(records)
    return case.blame("mismatch", named, text, wait, (since_s, first.source), fact, blames=blames)
