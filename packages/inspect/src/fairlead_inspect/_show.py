# SPDX-License-Identifier: Apache-2.0
"""A snapshot and its findings as tables, text, JSON and HTML, without secrets and escapes."""

import datetime
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairlead_placement.extension import WIDTH, format_coords, group_pairs

from ._verdict.case import CALLED
from ._verdict.positions import TICKS_PER_S, Position, find_own, frames_of_code, locate
from ._verdict.rules import NO_JOB, exit_status
from ._verdict.waits import add_label
from ._worker_sets import find_worker_sets
from .model import Actor, Finding, Frame, Job, Kind, Member, Snapshot, Stack, StackClass, Suspect, Waiting, WorkerSet

# Of the JSON; fields are added, and never renamed.
SCHEMA = 2
_WORD = r"(?:token|secret|passw(?:or)?d|passphrase|pwd|credential|signature|\bsig|auth|key)"
_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s&]+)"""
_NAME = rf"{_WORD}(?:s|[_-][\w-]*)?[\"']?\s*[=:]\s*|--?[\w-]*{_WORD}[\w-]*\s+"
_SECRETS = (
    (re.compile(r"(?i)(\bbearer\s+)\S+"), r"\1***"),
    (re.compile(rf"(?i)({_NAME}){_VALUE}"), r"\1***"),
    (re.compile(r"://[^@\s]+@"), "://***@"),
)
# The first word of a finding: these if it blames, and if nobody is late yet; else one of the others, as in the guide.
BLAMES, EARLY = "HANGS", "TOO EARLY"
WORDS: Mapping[Kind, str] = {
    "working": "WORKS", "pending": "PENDING", "missing": "MISSING", "dead": "DEAD", "stopped": "STOPPED",
    "deadlock": "DEADLOCK", "mismatch": "MISMATCH", "together": "WAIT", "node-silent": "SILENT", "driver": "DRIVER",
    "undecided": "UNDECIDED",
}  # fmt: skip
MOST_ROWS = 200
PTRACE = (
    "Give the workers' containers the capability SYS_PTRACE (securityContext.capabilities.add), run Ray as the user of "
    "the workers, or set kernel.yama.ptrace_scope to 0."
)


def clean(text: str) -> str:
    """Return a text of the job without secrets, and with control characters escaped.

    >>> clean("--api-key abc https://me:pw@host token=x \\x1b[31m")
    '--api-key *** https://***@host token=*** \\\\x1b[31m'
    """
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    home = os.path.expanduser("~")
    text = text.replace(home + "/", "~/") if len(home) > 1 else text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def clean_all(value: Any) -> Any:
    """Return a value of JSON with all its texts cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(key): clean_all(item) for key, item in value.items()}
    return [clean_all(item) for item in value] if isinstance(value, list | tuple) else value


def write_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, with runs of them shortened.

    >>> write_ranks([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs = group_pairs((rank - index, rank) for index, rank in enumerate(ranks)).values()
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


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


def _write_since(since_s: float | None, limit_s: float | None = None, source: str = "") -> str:
    limit, call = "" if limit_s is None else f" of {write_seconds(limit_s)}", "in its call " * (source == CALLED)
    return "" if since_s is None else f", {call}for {write_seconds(since_s)}{limit}"


def _write_process(process: Finding | Suspect) -> str:
    return f" on {process.node}, pid {process.pid}" if process.pid and process.node else ""


def _who(ranks: Sequence[int], ordinals: Sequence[int]) -> str:
    if ranks:
        return f"rank{'s' if len(ranks) > 1 else ''} {write_ranks(ranks)}"
    return ", ".join(f"#{ordinal}" for ordinal in ordinals)


def _name(finding: Finding, members: Mapping[str, Member]) -> str:
    """Return whom a finding is about, with the coordinates of a single rank."""
    if finding.subject:
        return finding.subject
    who = _who(finding.ranks, finding.ordinals)
    if who and finding.worker_set:
        coords = [members[actor.id].coords for actor in finding.actors if actor.id in members]
        who += format_coords(coords[0]) if len(coords) == 1 else ""
        return f"{who} of {finding.worker_set}" if finding.ranks else f"{finding.worker_set} {who}"
    if finding.task:
        return f"task {finding.task}"
    actors = ", ".join(f"{actor.class_name} {actor.name}".strip() for actor in finding.actors[:4])
    return actors or finding.worker_set or "the driver"


def draw_findings(snapshot: Snapshot, findings: Sequence[Finding]) -> RenderableType:
    """Return the verdict about each job."""
    parts: list[RenderableType] = []
    worker_sets, addresses = find_worker_sets(snapshot), {node.node_id: node.address for node in snapshot.nodes}
    members = {member.key: member for workers in worker_sets for member in workers.members}
    for job in snapshot.jobs:
        said = [finding for finding in findings if finding.job_id == job.job_id]
        actors = [actor for actor in snapshot.actors if actor.job_id == job.job_id and actor.state == "ALIVE"]
        driver = f"driver pid {job.pid} on {addresses.get(job.node_id, 'an unknown node')}, " if job.pid else ""
        numbers = {"actor": len(actors), "node": len({actor.node_id for actor in actors})}
        counted = ", ".join(f"{number} {noun}{'s' * (number != 1)}" for noun, number in numbers.items() if number)
        head = f"job {job.job_id} ({job.entrypoint}; {driver}{counted or 'no actors'}), seen in {snapshot.took_s:.1f} s"
        parts += [Text(clean(head), style="bold"), *(_draw_finding(finding, members) for finding in said)]
        if not said:
            parts.append(Text("Nothing hangs: no process waits for one that stands still.", style="green"))
    return Group(*parts or [Text(NO_JOB)], draw_gaps(snapshot))


def draw_gaps(snapshot: Snapshot) -> RenderableType:
    """Return what a snapshot lacks, and why."""
    silent = [node for node in snapshot.nodes if node.answer == "silent"]
    lines = [f"Node {node.address}: {node.note}" for node in silent[:8]]
    if unread := [process for process in snapshot.processes if process.note]:
        nodes = len({process.node_id for process in unread})
        notes = "; ".join(sorted({process.note for process in unread})[:3])
        count = f"{len(unread)} process{'es' * (len(unread) != 1)} on {nodes} node{'s' * (nodes != 1)}"
        lines.append(f"No stacks of {count}: {notes}.{f' {PTRACE}' if 'ermission' in notes else ''}")
    return Group(*(Text(clean(line), style="yellow") for line in (*lines, *snapshot.notes[:8])))


def _draw_finding(finding: Finding, members: Mapping[str, Member]) -> RenderableType:
    listed, confidence = bool(finding.suspects), finding.confidence
    sure = f"blame: {confidence}" if finding.blames else confidence
    if finding.blames and finding.ranks and finding.rank_confidence:
        sure = f"rank: {finding.rank_confidence}, {sure}"
    place = "" if listed else _write_process(finding)
    since = _write_since(finding.since_s, finding.limit_s, finding.since_source)
    said = f"{_name(finding, members)}{place}{since}: {finding.text} ({finding.kind}; {sure})"
    suspects = (
        f"{suspect.name}{_write_process(suspect)}{_write_since(suspect.since_s, source=suspect.since_source)}: "
        f"{write_stack(suspect.where) or 'no stack'} ({suspect.text})"
        for suspect in finding.suspects
    )
    rows = [
        ("at", "" if listed else write_stack(finding.where)),
        ("others", _describe(finding.waiting)),
        ("chain", "  ->  ".join(finding.chain)),
        *(("suspect", text) for text in suspects),
        ("proof", "; ".join(f"{fact.source}: {fact.text}" for fact in finding.evidence)),
        ("next", finding.remedy),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    early = finding.kind == "working" and finding.limit_s is not None
    head = BLAMES if finding.blames else EARLY if early else WORDS[finding.kind]
    grid.add_row(Text(head, style="bold red" if finding.blames else "bold"), Text(clean(said), style="bold"))
    for label, text in rows:
        if text:
            grid.add_row(Text(f"  {label}"), Text(clean(text)))
    return grid


def _describe(waiting: Waiting) -> str:
    if not waiting.count:
        return ""
    who, place = _who(waiting.ranks, waiting.ordinals), write_stack(waiting.where)
    who, place = f" ({who})" if who else "", f" at {place}" if place else ""
    return f"{waiting.count} {'waits' if waiting.count == 1 else 'wait'}{who}{place}{_write_since(waiting.since_s)}"


def to_json(snapshot: Snapshot, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a snapshot and its findings as JSON, without secrets."""
    worker_sets = find_worker_sets(snapshot)
    noted = [process for process in snapshot.processes if process.note]
    unread = [{"node": process.node_id, "pid": process.pid, "reason": process.note} for process in noted]
    silent = [{"node": node.address, "reason": node.note} for node in snapshot.nodes if node.answer == "silent"]
    fields: dict[str, Any] = clean_all(
        {
            "schema": SCHEMA,
            "looked_at": snapshot.looked_at,
            "wrong": any(finding.blames for finding in findings),
            "status": exit_status(findings),
            "complete": not unread and not silent,
            "jobs": [_job_fields(job, worker_sets, findings) for job in snapshot.jobs],
            "unanswered": silent,
            "unreadable": unread,
            "notes": snapshot.notes,
            "took_s": snapshot.took_s,
        }
    )
    return fields


def _job_fields(job: Job, worker_sets: Iterable[WorkerSet], findings: Iterable[Finding]) -> dict[str, Any]:
    own = [asdict(workers) for workers in worker_sets if workers.job_id == job.job_id]
    shown = "confidence", "world_size", "disputed", "members"
    return {
        "id": job.job_id,
        "driver": {"pid": job.pid, "node": job.node_id, "entrypoint": job.entrypoint},
        "worker_sets": [
            {"key": alike["name"], "source": alike["rule"], **{name: alike[name] for name in shown}} for alike in own
        ],
        "findings": [_finding_fields(finding) for finding in findings if finding.job_id == job.job_id],
    }


def _finding_fields(finding: Finding) -> dict[str, Any]:
    actors = [{"id": actor.id, "class": actor.class_name, "name": actor.name} for actor in finding.actors]
    return {name: value for name, value in {**asdict(finding), "actors": actors}.items() if name != "job_id"}


def list_processes(snapshot: Snapshot) -> list[tuple[dict[str, Any], Position]]:
    """Return a row for each process, by worker set and rank, and where it stands."""
    members = {member.key: (workers, member) for workers in find_worker_sets(snapshot) for member in workers.members}
    actors = {(actor.node_id, actor.pid): actor for actor in snapshot.actors if actor.pid}
    drivers = {(job.node_id, job.pid): Actor("", "driver", job.job_id) for job in snapshot.jobs}
    addresses, rows = {node.node_id: node.address for node in snapshot.nodes}, []
    for process in snapshot.processes:
        key = process.node_id, process.pid
        actor = actors.get(key) or drivers.get(key) or Actor("", "", "")
        workers, member = members.get(actor.actor_id, (None, Member("")))
        label = snapshot.labels.get(actor.actor_id, {})
        position = add_label(locate(process, driver=key in drivers), label)
        row: dict[str, Any] = {
            "worker_set": workers.name if workers else "",
            "rank": member.rank,
            "coords": member.coords,
            "step": label.get("step"),
            "ordinal": member.ordinal if workers else None,
            "rank_source": member.source,
            "actor": actor.actor_id,
            "class": actor.class_name,
            "name": actor.name,
            "job": actor.job_id,
            "node": addresses.get(process.node_id, ""),
            "pid": process.pid,
            "state": process.states[1],
            "title": process.title,
            "does": position.kind,
            "motion": position.motion,
            "cpu": process.ticks / process.window_s / TICKS_PER_S,
            "last_ran_s": position.since_s,
            "memory_bytes": process.memory_bytes,
            "where": [asdict(frame) for frame in _frames(position)],
            "note": process.note,
        }
        rows.append((row, position))
    order = "job", "worker_set", "rank", "ordinal"
    return sorted(rows, key=lambda pair: [pair[0][name] or 0 if name[0] in "ro" else pair[0][name] for name in order])


def _frames(position: Position) -> Stack:
    return frames_of_code(position.thread.stack) if position.thread else position.where


def _rank(row: Mapping[str, Any]) -> str:
    return str(row["rank"]) if row["rank"] is not None else f"#{row['ordinal']}" if row["ordinal"] is not None else ""


def draw_processes(rows: Sequence[tuple[dict[str, Any], Position]]) -> RenderableType:
    """Return a table with a line for each process, without lines, which fits 80 columns."""
    steps = any(row["step"] is not None for row, _ in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    columns = ("worker set", "rank", "node", "pid", "", "does", *["step"] * steps, "cpu", "last ran", "memory")
    for column in columns:
        table.add_column(column, no_wrap=True)
    table.add_column("at")
    for row, position in rows[:MOST_ROWS]:
        moves = "" if position.motion == "unknown" else f", {position.motion}"
        cells = [row["worker_set"] or row["class"] or row["title"], _rank(row) + format_coords(row["coords"])]
        cells += [row["node"], str(row["pid"]), row["state"], position.kind + moves]
        cells += ["" if row["step"] is None else str(row["step"])] * steps
        cells += [f"{row['cpu']:.0%}", "" if position.since_s is None else f"{write_seconds(position.since_s)} ago"]
        cells += [f"{row['memory_bytes'] / 2**20:.0f} MiB"]
        stack = position.thread.stack if position.thread else position.where
        where = write_stack(stack) or row["note"] or row["title"]
        table.add_row(*(Text(clean(cell)) for cell in cells), Text(clean(where), overflow="ellipsis"))
    more = [Text(f"{len(rows) - MOST_ROWS} more; `ps --json` has all of them.")] if len(rows) > MOST_ROWS else []
    return Group(table, *more)


def fold_stacks(snapshot: Snapshot) -> list[StackClass]:
    """Return the distinct positions of a snapshot with the processes that stand there, the smallest class first."""
    classes = group_pairs(
        ((row["worker_set"] or row["class"] or row["title"], position.kind, position.where), (row, position))
        for row, position in list_processes(snapshot)
    )
    folded = []
    for (workers, does, _), alike in classes.items():
        ranks, pids = tuple(_rank(row) for row, _ in alike), tuple(row["pid"] for row, _ in alike)
        folded.append(StackClass(workers, does, ranks, pids, _frames(alike[0][1])))
    return sorted(folded, key=lambda alike: len(alike.pids))


def draw_stacks(classes: Iterable[StackClass]) -> RenderableType:
    """Return the distinct positions, each under those that stand there."""
    parts: list[RenderableType] = []
    for alike in classes:
        who = ", ".join(filter(None, alike.ranks)) or f"pid {', '.join(map(str, alike.pids))}"
        parts.append(Text(clean(f"{alike.worker_set} {who}: {alike.does}"), style="bold"))
        lines = (f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in alike.where)
        parts += [Text(clean(line)) for line in lines]
    return Group(*parts)


def write_report(snapshot: Snapshot, findings: Sequence[Finding], path: str | os.PathLike[str]) -> None:
    """Write a snapshot and its verdict as one HTML file that loads nothing from elsewhere.

    Values that look like a token or a password are redacted, and texts of the job are escaped.

    Args:
        snapshot: what `look` has returned.
        findings: its verdict, which `diagnose` returned.
        path: the file, which is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    moment = datetime.datetime.fromtimestamp(snapshot.looked_at, datetime.UTC)
    redacted = "Values that look like a token or a password are redacted."
    console.print(Text(f"What a Ray job waits for, on {moment:%Y-%m-%d %H:%M:%S} UTC. {redacted}"))
    for heading, shown in (
        ("Verdict", draw_findings(snapshot, findings)),
        ("Processes", draw_processes(list_processes(snapshot))),
        ("Where they stand", draw_stacks(fold_stacks(snapshot))),
    ):
        console.print(Text(f"\n{heading}\n", style="bold underline"), shown, sep="")
    console.save_html(os.fspath(path))
