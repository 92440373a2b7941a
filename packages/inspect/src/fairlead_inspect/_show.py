# SPDX-License-Identifier: Apache-2.0
"""A look and its findings as tables, text and JSON, without secrets and escapes."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairlead_placement.extension import group_pairs

from ._fleets import find_fleets
from ._verdict.positions import TICKS_PER_S, Position, find_own, frames_of_code, locate
from ._verdict.rules import exit_status
from ._verdict.waits import add_label
from .model import Actor, Finding, Fleet, Frame, Job, Member, Snapshot, Stack, StackClass, Suspect, Waiting

# Of the JSON; fields are added, and never renamed.
SCHEMA = 2
# Names of fields that differ in JSON.
_FIELDS = {"fleet": "worker_set"}
_WORD = r"(?:token|secret|passw(?:or)?d|passphrase|pwd|credential|signature|\bsig|auth|key)"
_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s&]+)"""
_NAME = rf"{_WORD}(?:s|[_-][\w-]*)?[\"']?\s*[=:]\s*|--?[\w-]*{_WORD}[\w-]*\s+"
_SECRETS = (
    (re.compile(r"(?i)(\bbearer\s+)\S+"), r"\1***"),
    (re.compile(rf"(?i)({_NAME}){_VALUE}"), r"\1***"),
    (re.compile(r"://[^@\s]+@"), "://***@"),
)
_HEADS = {"working": "WORKS", "undecided": "UNDECIDED", "together": "WAIT", "mismatch": "MISMATCH", "driver": "DRIVER"}
MOST_ROWS = 200
NO_JOB = "No job runs on this cluster."
PTRACE = (
    "Give the workers' containers the capability SYS_PTRACE (securityContext.capabilities.add), run Ray as the user of "
    "the workers, or set kernel.yama.ptrace_scope to 0."
)


def is_refused(note: str) -> bool:
    """Return whether a note says that the memory of a process may not be read, for which `PTRACE` is the remedy."""
    return "ermission" in note


def clean(text: str) -> str:
    """Return a text of the job without secrets, and with control characters escaped.

    >>> clean("--api-key abc https://me:pw@host token=x \\x1b[31m")
    '--api-key *** https://***@host token=*** \\\\x1b[31m'
    """
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    home = os.path.expanduser("~")
    text = text.replace(home + "/", "~/") if len(home) > 1 else text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def clean_all(value: Any) -> Any:
    """Return a value of JSON with all its texts cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(key): clean_all(one) for key, one in value.items()}
    return [clean_all(one) for one in value] if isinstance(value, list | tuple) else value


def write_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, with runs of them shortened.

    >>> write_ranks([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def write_seconds(seconds: float) -> str:
    """Return a duration for people.

    >>> write_seconds(3.21), write_seconds(43.2), write_seconds(75), write_seconds(7265), write_seconds(200000)
    ('3.2 s', '43 s', '1m 15s', '2h 1m', '2d 7h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if hours < 24 else f"{hours // 24}d {hours % 24}h"


def write_stack(stack: Stack) -> str:
    """Return a stack as one line: where the job's code stands, and the innermost function.

    >>> write_stack((Frame("/usr/lib/python3.11/queue.py", "Queue.get", 171), Frame("/w/data.py", "next", 33)))
    'data.py:33 next  ->  Queue.get (queue.py:171)'
    """
    own, inner = find_own(stack), stack[0] if stack else None
    parts = [] if own is None else [f"{_place(own)} {own.function}"]
    if inner is not None and inner is not own:
        parts.append(f"{inner.function} ({_place(inner)})")
    return "  ->  ".join(parts)


def _place(frame: Frame) -> str:
    name = frame.file.rpartition("/")[2]
    return f"{name}:{frame.line}" if frame.line else name


def _who(ranks: Sequence[int], ordinals: Sequence[int]) -> str:
    numbers = write_ranks(ranks) if ranks else ", ".join(f"#{one}" for one in ordinals)
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}" if ranks else numbers


def write_coords(coords: Mapping[str, int]) -> str:
    """Return coordinates as text to put behind a rank.

    >>> write_coords({"dp": 1, "tp": 0}), write_coords({})
    (' (dp=1, tp=0)', '')
    """
    return f" ({', '.join(f'{axis}={at}' for axis, at in coords.items())})" if coords else ""


def _name(finding: Finding, members: Mapping[str, Member]) -> str:
    """Return whom a finding is about, with the coordinates that all of them have in common."""
    if finding.subject:
        return finding.subject
    who = _who(finding.ranks, finding.ordinals)
    if finding.fleet and finding.ordinals and not finding.ranks:
        return f"{finding.fleet} {who}"
    if who and finding.fleet:
        first, *others = [members[one.id].coords for one in finding.actors if one.id in members] or [{}]
        common = {axis: at for axis, at in first.items() if all(one.get(axis) == at for one in others)}
        return f"{who}{write_coords(common)} of {finding.fleet}"
    if finding.task:
        return f"task {finding.task}"
    actors = ", ".join(f"{one.class_name} {one.name}".strip() for one in finding.actors[:4])
    return actors or finding.fleet or "the driver"


def _confidence(finding: Finding) -> str:
    """Return how sure a finding is, and of what."""
    if not finding.blames:
        return finding.confidence
    blame = f"blame: {finding.confidence}"
    return f"rank: {finding.rank_confidence}, {blame}" if finding.ranks and finding.rank_confidence else blame


def draw_findings(snapshot: Snapshot, findings: Sequence[Finding], *, verbose: bool = False) -> RenderableType:
    """Return the verdict about each job."""
    parts: list[RenderableType] = []
    fleets, addresses = find_fleets(snapshot), {one.node_id: one.address for one in snapshot.nodes}
    members = {member.key: member for fleet in fleets for member in fleet.members}
    for job in snapshot.jobs:
        here = [one for one in findings if one.job_id == job.job_id]
        actors = [one for one in snapshot.actors if one.job_id == job.job_id and one.state == "ALIVE"]
        driver = f"driver pid {job.pid} on {addresses.get(job.node_id, 'an unknown node')}, " if job.pid else ""
        numbers = {
            "worker set": sum(one.job_id == job.job_id for one in fleets),
            "actor": len(actors),
            "node": len({one.node_id for one in actors}),
        }
        counted = ", ".join(f"{number} {noun}{'s' * (number != 1)}" for noun, number in numbers.items() if number)
        head = f"job {job.job_id} ({job.entrypoint}; {driver}{counted or 'no actors'}), seen in {snapshot.took_s:.1f} s"
        parts += [Text(clean(head), style="bold"), *(_draw_finding(one, members, verbose) for one in here)]
        if not here:
            parts.append(Text("Nothing hangs: no process waits for one that stands still.", style="green"))
    parts.append(draw_gaps(snapshot))
    return Group(*parts) if snapshot.jobs else Text(NO_JOB)


def draw_gaps(snapshot: Snapshot) -> RenderableType:
    """Return what a look could not read, and why."""
    silent = [one for one in snapshot.nodes if one.answer == "silent"]
    lines = [f"Node {one.address}: {one.note}" for one in silent[:8]]
    if unread := [one for one in snapshot.processes if one.note]:
        nodes = len({one.node_id for one in unread})
        notes = "; ".join(sorted({one.note for one in unread})[:3])
        count = f"{len(unread)} process{'es' * (len(unread) != 1)} on {nodes} node{'s' * (nodes != 1)}"
        text = f"No stacks of {count}: {notes}."
        lines.append(text + (f" {PTRACE}" if is_refused(notes) else ""))
    return Group(*(Text(clean(one), style="yellow") for one in (*lines, *snapshot.notes[:8])))


def _draw_finding(one: Finding, members: Mapping[str, Member], verbose: bool) -> RenderableType:
    since = "" if one.since_s is None else f", for {write_seconds(one.since_s)}"
    at = f" on {one.node}, pid {one.pid}" if one.pid and one.node and not one.suspects else ""
    rows = [
        ("at", "" if one.suspects else write_stack(one.where)),
        ("others", _describe(one.waiting)),
        ("chain", "  ->  ".join(one.chain)),
    ]
    proof = one.evidence if verbose else one.evidence[:3]
    rows += [("suspect", _describe_suspect(suspect)) for suspect in one.suspects]
    rows += [("proof", "; ".join(f"{fact.source}: {fact.text}" for fact in proof)), ("next", one.remedy)]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    head = "HANGS" if one.blames else _HEADS.get(one.kind, one.kind.upper())
    said = f"{_name(one, members)}{at}{since}: {one.text} ({one.kind}; {_confidence(one)})"
    grid.add_row(Text(head, style="bold red" if one.blames else "bold"), Text(clean(said), style="bold"))
    for label, text in rows:
        if text:
            grid.add_row(Text(f"  {label}"), Text(clean(text)))
    return grid


def _describe_suspect(one: Suspect) -> str:
    since = "" if one.since_s is None else f", for {write_seconds(one.since_s)}"
    at = f" on {one.node}, pid {one.pid}" if one.pid and one.node else ""
    return f"{one.name}{at}{since}: {write_stack(one.where)} ({one.text})"


def _describe(waiting: Waiting) -> str:
    if not waiting.count:
        return ""
    who = _who(waiting.ranks, waiting.ordinals)
    since = "" if waiting.since_s is None else f", for {write_seconds(waiting.since_s)}"
    wait = "waits" if waiting.count == 1 else "wait"
    place = write_stack(waiting.where)
    return f"{waiting.count} {wait}{f' ({who})' if who else ''}{f' at {place}' if place else ''}{since}"


def to_json(snapshot: Snapshot, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a look and its findings as JSON, without secrets."""
    fleets = find_fleets(snapshot)
    unread = [{"node": one.node_id, "pid": one.pid, "reason": one.note} for one in snapshot.processes if one.note]
    silent = [{"node": one.address, "reason": one.note} for one in snapshot.nodes if one.answer == "silent"]
    found: dict[str, Any] = clean_all(
        {
            "schema": SCHEMA,
            "looked_at": snapshot.looked_at,
            "wrong": any(one.blames for one in findings),
            "status": exit_status(findings),
            "complete": not unread and not silent,
            "jobs": [_job_fields(job, fleets, findings) for job in snapshot.jobs],
            "unanswered": silent,
            "unreadable": unread,
            "notes": snapshot.notes,
            "took_s": snapshot.took_s,
        }
    )
    return found


def _job_fields(job: Job, fleets: Iterable[Fleet], findings: Iterable[Finding]) -> dict[str, Any]:
    here = [asdict(one) for one in fleets if one.job_id == job.job_id]
    names = {"key": "name", "source": "rule"} | {
        name: name for name in ("confidence", "world_size", "disputed", "members")
    }
    return {
        "id": job.job_id,
        "driver": {"pid": job.pid, "node": job.node_id, "entrypoint": job.entrypoint},
        "worker_sets": [{field: one[name] for field, name in names.items()} for one in here],
        "findings": [_finding_fields(one) for one in findings if one.job_id == job.job_id],
    }


def _finding_fields(one: Finding) -> dict[str, Any]:
    fields = asdict(one)
    fields["actors"] = [{"id": of.id, "class": of.class_name, "name": of.name} for of in one.actors]
    return {_FIELDS.get(name, name): value for name, value in fields.items() if name != "job_id"}


def to_fields(one: StackClass) -> dict[str, Any]:
    """Return the fields of a class of stacks in JSON."""
    return {_FIELDS.get(name, name): value for name, value in asdict(one).items()}


def list_processes(snapshot: Snapshot) -> list[tuple[dict[str, Any], Position]]:
    """Return a row for each process, by worker set and rank, and where it stands."""
    members = {one.key: (fleet, one) for fleet in find_fleets(snapshot) for one in fleet.members}
    actors = {(one.node_id, one.pid): one for one in snapshot.actors if one.pid}
    drivers = {(one.node_id, one.pid): one.job_id for one in snapshot.jobs}
    addresses, rows = {one.node_id: one.address for one in snapshot.nodes}, []
    for process in snapshot.processes:
        at = process.node_id, process.pid
        actor, driver = actors.get(at, Actor("", "driver" if at in drivers else "", drivers.get(at, ""))), at in drivers
        fleet, member = members.get(actor.actor_id, (None, Member("")))
        label = snapshot.labels.get(actor.actor_id, {})
        position = add_label(locate(process, driver=driver), label)
        row: dict[str, Any] = {"worker_set": fleet.name if fleet else "", "rank": member.rank}
        row |= {"coords": member.coords, "step": label.get("step")}
        row["ordinal"] = member.ordinal if fleet else None
        row |= {"rank_source": member.source, "actor": actor.actor_id, "class": actor.class_name, "name": actor.name}
        row |= {"job": actor.job_id, "node": addresses.get(process.node_id, ""), "pid": process.pid}
        row |= {"state": process.states[1], "title": process.title, "does": position.kind, "motion": position.motion}
        row |= {"cpu": process.ticks / process.window_s / TICKS_PER_S, "last_ran_s": position.since_s}
        where = list(map(asdict, _frames(position)))
        row |= {"memory_bytes": process.memory_bytes, "where": where, "note": process.note}
        rows.append((row, position))
    return sorted(
        rows, key=lambda one: (one[0]["job"], one[0]["worker_set"], one[0]["rank"] or 0, one[0]["ordinal"] or 0)
    )


def _frames(position: Position) -> Stack:
    return frames_of_code(position.thread.stack) if position.thread else position.where


def _does(at: Position) -> str:
    return at.kind if at.motion == "unknown" else f"{at.kind}, {at.motion}"


def _rank(row: Mapping[str, Any]) -> str:
    return str(row["rank"]) if row["rank"] is not None else f"#{row['ordinal']}" if row["ordinal"] is not None else ""


def make_table(*columns: str, flexible: Sequence[str]) -> Table:
    """Return a table without lines, which fits 80 columns; the flexible columns get what is left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for column in flexible:
        table.add_column(column)
    return table


def draw_processes(rows: Sequence[tuple[dict[str, Any], Position]]) -> RenderableType:
    """Return a table with a line for each process."""
    steps = ["step"] if any(row["step"] is not None for row, _ in rows) else []
    columns = "worker set", "rank", "node", "pid", "", "does", *steps, "cpu", "last ran", "memory"
    table = make_table(*columns, flexible=["at"])
    for row, at in rows[:MOST_ROWS]:
        ran = "" if at.since_s is None else f"{write_seconds(at.since_s)} ago"
        stack = at.thread.stack if at.thread else at.where
        where = write_stack(stack) or row["note"] or row["title"]
        rank = _rank(row) + write_coords(row["coords"])
        cells = [row["worker_set"] or row["class"], rank, row["node"], str(row["pid"]), row["state"]]
        step = "" if row["step"] is None else str(row["step"])
        cells += [
            _does(at),
            *([step] if steps else []),
            f"{row['cpu']:.0%}",
            ran,
            f"{row['memory_bytes'] / 2**20:.0f} MiB",
        ]
        table.add_row(*(Text(clean(cell)) for cell in cells), Text(clean(where), overflow="ellipsis"))
    more = [Text(f"{len(rows) - MOST_ROWS} more; `ps --json` has all of them.")] if len(rows) > MOST_ROWS else []
    return Group(table, *more)


def fold_stacks(snapshot: Snapshot) -> list[StackClass]:
    """Return the distinct positions of a look with the processes that stand there, the smallest class first.

    Args:
        snapshot: a look that `look` returned.
    """
    classes = group_pairs(
        ((row["worker_set"] or row["class"], at.kind, at.where), (row, at)) for row, at in list_processes(snapshot)
    )
    folded = [
        StackClass(
            fleet,
            does,
            tuple(_rank(row) for row, _ in there),
            tuple(row["pid"] for row, _ in there),
            _frames(there[0][1]),
        )
        for (fleet, does, _), there in classes.items()
    ]
    return sorted(folded, key=lambda one: len(one.pids))


def draw_stacks(classes: Iterable[StackClass]) -> RenderableType:
    """Return the distinct positions, each under those that stand there."""
    parts: list[RenderableType] = []
    for one in classes:
        who = ", ".join(filter(None, one.ranks)) or f"pid {', '.join(map(str, one.pids))}"
        parts.append(Text(clean(f"{one.fleet} {who}: {one.does}"), style="bold"))
        lines = (f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in one.where)
        parts += [Text(clean(line)) for line in lines]
    return Group(*parts)
