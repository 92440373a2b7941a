# SPDX-License-Identifier: Apache-2.0
"""The source for Fairlead's groups, and the commands that look at these alone."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Group

from fairlead_placement.spi import Output, add_command
from fairlead_workergroup import WorkerGroupError
from fairlead_workergroup.spi import STUCK_AFTER_S, RegisteredGroup, find_group, find_groups

from ._diagnosis import Finding, diagnose
from ._groups import SeenGroup, look_at_groups
from ._source import Report
from ._stacks import fold_stacks
from ._tables import draw_findings, draw_groups, draw_stacks, draw_status

# Of the JSON; it changes when a field changes its meaning or goes.
SCHEMA = 1
# How often workers that seem late are looked at again.
LOOKS = 2


def add_commands(
    commands: Any,
    *,
    why: argparse.ArgumentParser,
    stacks: argparse.ArgumentParser,
    epilog: str,
) -> None:
    """Add the commands that look at groups, and the options for groups of those that look at any job."""

    def add(name: str, what: str, *, one_group: bool = True) -> argparse.ArgumentParser:
        parser = add_command(commands, name, what, epilog=epilog, json=True)
        if one_group:
            _add_group(parser)
        return parser

    groups = add("groups", "list the groups of Fairlead of all jobs", one_group=False)
    groups.set_defaults(run=_groups)
    status = add("status", "show what each worker of a group is doing")
    status.add_argument("--all", action="store_true", help="a line for each worker, however many do the same")
    status.set_defaults(run=_status)
    for parser in (why, stacks):
        _add_group(parser)
    stacks.add_argument("--threads", action="store_true", help="of a group: all threads, not only the method's")


def _add_group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", metavar="NAME", help="only this group of Fairlead: name, or six digits of its id")
    parser.add_argument("--at", type=_coords, default={}, metavar="dp=1,tp=0", help="only these workers of it")


def _coords(text: str) -> dict[str, int]:
    coords = {}
    for part in text.split(","):
        axis, _, at = part.partition("=")
        if not axis.strip() or not at.strip().isdigit():
            raise argparse.ArgumentTypeError(f"must be like 'dp=1,tp=0', got {text!r}")
        coords[axis.strip()] = int(at)
    return coords


def _choose_ranks(group: RegisteredGroup, coords: dict[str, int]) -> list[int] | None:
    if not coords:
        return None
    try:
        return group.sharding.get_ranks_by_coord(**coords)
    except (ValueError, IndexError, KeyError) as error:
        raise WorkerGroupError(f"--at: {error}") from None


def _look(options: argparse.Namespace, *, stuck_after_s: float = STUCK_AFTER_S, dump: bool = False) -> SeenGroup:
    group = find_group(options.group)
    ranks = _choose_ranks(group, options.at)
    (seen,) = look_at_groups([group], stuck_after_s=stuck_after_s, dump=dump, ranks=ranks)
    return seen


def _groups(options: argparse.Namespace, output: Output) -> int:
    seen = look_at_groups(find_groups(), stuck_after_s=STUCK_AFTER_S)
    if options.json:
        output.print_json({"schema": SCHEMA, "groups": [_group_fields(one) for one in seen]})
    else:
        output.print(draw_groups(seen))
    return 0


def _group_fields(seen: SeenGroup) -> dict[str, Any]:
    group = seen.group
    return {
        "id": group.group_id,
        "name": group.name,
        "class": group.class_name,
        "mesh": dict(group.shape),
        "workers": len(seen.workers),
        "alive": len(seen.workers) - seen.count("dead", "unknown"),
        "dead": seen.count("dead"),
        "stuck": seen.count("stuck"),
        "memory_bytes": sum(worker.memory_bytes for worker in seen.workers),
        "age_s": seen.age_s,
        "epoch": group.epoch,
        "driver": {**{key: group.driver[key] for key in ("job_id", "node_id", "host", "pid")}, "state": seen.driver},
    }


def _status(options: argparse.Namespace, output: Output) -> int:
    seen = _look(options)
    if options.json:
        workers = [{key: value for key, value in asdict(one).items() if key != "stacks"} for one in seen.workers]
        output.print_json({"schema": SCHEMA, "group": _group_fields(seen), "workers": workers})
    else:
        output.print(draw_status(seen, every=options.all))
    return 0


def print_stacks(options: argparse.Namespace, output: Output) -> int:
    seen = _look(options, stuck_after_s=0.0, dump=True)
    folded = fold_stacks(seen.workers, threads=options.threads)
    if options.json:
        output.print_json({"schema": SCHEMA, "group": _group_fields(seen), "stacks": list(map(asdict, folded))})
    else:
        output.print(draw_stacks(folded))
    return 0


def look_again(seen: SeenGroup, after_s: float) -> SeenGroup:
    """Look again at workers that seem late: one in a loop of its own is at times in another line than the others."""
    for _ in range(LOOKS):
        found = diagnose(seen, stuck_after_s=after_s)
        late = {rank for one in found if one.kind == "late" for rank in one.ranks}
        if not late:
            break
        (again,) = look_at_groups([seen.group], stuck_after_s=after_s, dump=True, ranks=late)
        latest = {one.rank: one for one in again.workers}
        seen = replace(seen, workers=tuple(latest.get(one.rank, one) for one in seen.workers))
    return seen


def find_actors() -> frozenset[str]:
    """Return the ids of the actors of all groups, which this source judges by what their workers record."""
    return frozenset(one.actor_id for group in find_groups() for one in group.members)


def report(options: argparse.Namespace) -> Report:
    """Return what is wrong with one group, or with all."""
    groups = find_groups() if options.group is None and not options.at else [find_group(options.group)]
    after = 10.0 if options.after is None else options.after
    chosen = _choose_ranks(groups[0], options.at) if groups else None
    found = [examine(one, after, chosen) for one in look_at_groups(groups, stuck_after_s=after, dump=True)]
    wrong = any(finding.wrong for _, findings in found for finding in findings)
    rows = [{**_group_fields(one), "findings": list(map(asdict, findings))} for one, findings in found]
    return Report(wrong, {"groups": rows}, Group(*(draw_findings(one, findings) for one, findings in found)))


def examine(seen: SeenGroup, after_s: float, chosen: Sequence[int] | None = None) -> tuple[SeenGroup, list[Finding]]:
    """Return a group after another look, and what is wrong with it; of chosen ranks, also what they wait for."""
    seen = look_again(seen, after_s)
    findings = diagnose(seen, stuck_after_s=after_s)
    if chosen is None:
        return seen, findings
    shown = [one for one in findings if not one.ranks or {*one.ranks, *one.waiting} & {*chosen}]
    if any(one.kind == "stuck" and not one.wrong for one in shown):  # they wait for ranks that are dead or stopped
        shown = [one for one in findings if one in shown or one.kind in ("dead", "stopped")]
    return replace(seen, workers=tuple(one for one in seen.workers if one.rank in chosen)), shown
