# SPDX-License-Identifier: Apache-2.0
"""What people see of groups and workers on a terminal."""

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .diagnosis import Finding, write_coords
from .groups import SeenGroup, SeenWorker
from .stacks import FoldedStack, write_ranks

# More workers than this are shown with those together that do the same.
MOST_ROWS = 40
_STYLES = {
    "dead": "bold red",
    "stuck": "bold magenta",
    "stopped": "bold yellow",
    "unknown": "yellow",
    "starting": "cyan",
}
_HEADS = {"dead": "DEAD", "stopped": "STOPPED", "late": "LATE", "stuck": "STUCK", "driver": "DRIVER"}


def draw_groups(groups: Sequence[SeenGroup]) -> RenderableType:
    """Return a table with a row for each group."""
    if not groups:
        return Text("No worker group is registered on this cluster.")
    table = Table("group", "class", "mesh", "alive", "dead", "stuck", "memory", "age", "driver")
    for seen in groups:
        group, driver = seen.group, seen.group.driver
        orphaned = "orphaned: its driver is gone" if seen.driver == "gone" else ""
        who = f"{driver['pid']} on {driver['host']}, job {driver['job_id']}"
        table.add_row(
            Text(group.label),
            Text(group.class_name),
            Text(write_coords(group.shape)),
            Text(str(len(seen.workers) - seen.count("dead", "unknown"))),
            _number(seen.count("dead"), "dead"),
            _number(seen.count("stuck"), "stuck"),
            Text(write_bytes(sum(worker.memory_bytes for worker in seen.workers))),
            Text(write_seconds(seen.age_s)),
            Text(orphaned or (f"{who} (stopped)" if seen.driver == "stopped" else who)),
        )
    return table


def _number(count: int, state: str) -> Text:
    return Text(str(count), style=_STYLES[state] if count else "")


def draw_status(seen: SeenGroup, *, every: bool = False, most_rows: int = MOST_ROWS) -> RenderableType:
    """Return a table with a line for each worker; of many, a line for those together that do the same.

    Args:
        seen: the group.
        every: a line for each worker, however many there are.
        most_rows: how many workers have a line each.
    """
    alike = [[worker] for worker in seen.workers]
    if not every and len(alike) > most_rows:
        alike = _fold(seen.workers)
    table = Table("rank", "at", "node", "pid", "state", "method", "for", "step", "message", "memory")
    for column, width in (("message", 40), ("method", 30)):
        next(one for one in table.columns if one.header == column).max_width = width
    for workers in alike:
        table.add_row(*_cells(workers))
    group = seen.group
    head = Text(f"{group.label}: {group.class_name}, {write_coords(group.shape)}, {len(seen.workers)} workers", "bold")
    states = {one: seen.count(one) for one in ("busy", "idle", "starting", "stuck", "dead", "unknown")}
    counted = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    return Group(head, Text(f"{counted}; driver {seen.driver}; {write_seconds(seen.age_s)} old"), table)


def _fold(workers: Sequence[SeenWorker]) -> list[list[SeenWorker]]:
    found: dict[tuple[object, ...], list[SeenWorker]] = {}
    for one in workers:
        key = (one.state, one.stopped, one.method, one.step, one.message, one.incarnation, one.note)
        found.setdefault(key, []).append(one)
    return sorted(found.values(), key=lambda alike: alike[0].rank)


def _cells(workers: Sequence[SeenWorker]) -> list[Text]:
    first = workers[0]
    state = "stopped" if first.stopped else first.state
    nodes = sorted({worker.node_id[:8] for worker in workers if worker.node_id})
    again = f" ({first.incarnation} restarts)" if first.incarnation else ""
    common = {axis: at for axis, at in first.coords.items() if all(one.coords[axis] == at for one in workers)}
    return [
        Text(write_ranks([one.rank for one in workers])),
        Text(write_coords(common)),
        Text(nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else ""),
        Text((str(first.pid) if first.pid else "") if len(workers) == 1 else f"{len(workers)} pids"),
        Text(state + again, style=_STYLES.get(state, "")),
        Text(first.method or (first.note if state in ("dead", "unknown", "starting") else "")),
        Text(_range([one.running_s for one in workers], write_seconds) if first.method else ""),
        Text("" if first.step is None else str(first.step)),
        Text(first.message),
        Text(_range([float(one.memory_bytes) for one in workers], write_bytes)),
    ]


def _range(values: Sequence[float], write: object) -> str:
    low, high = write(min(values)), write(max(values))  # type: ignore[operator]
    return str(low) if low == high else f"{low} to {high}"


def draw_stacks(folded: Sequence[FoldedStack]) -> RenderableType:
    """Return the distinct stacks, each under its ranks."""
    parts: list[RenderableType] = []
    for one in folded:
        parts.append(Text(f"rank{'s' if len(one.ranks) > 1 else ''} {write_ranks(one.ranks)}:", style="bold"))
        parts += [Text("  " + line) for line in one.stacks.splitlines()]
    return Group(*parts)


def draw_findings(seen: SeenGroup, findings: Sequence[Finding]) -> RenderableType:
    """Return the diagnosis of a group."""
    group = seen.group
    wrong = any(finding.wrong for finding in findings)
    verdict = "something is wrong" if wrong else "nothing is wrong"
    head = f"{group.label}: {group.class_name}, {write_coords(group.shape)}, {len(seen.workers)} workers: {verdict}"
    parts: list[RenderableType] = [Text(head, style="bold red" if wrong else "bold green")]
    for finding in findings:
        name = _HEADS.get(finding.kind, finding.kind.upper())
        parts.append(
            Text.assemble((f"{name:9}", _STYLES.get(finding.kind, "bold red" if finding.wrong else "")), finding.text)
        )
        parts += [Text(f"         {line}", style="dim") for line in finding.stacks.splitlines()]
    if not findings:
        busy = [one for one in seen.workers if one.method]
        doing = f"{len(busy)} of {len(seen.workers)} workers run a method" if busy else "All workers are idle"
        parts.append(Text(f"{doing}; none of them is elsewhere than its peers for long."))
    return Group(*parts)


def write_seconds(seconds: float) -> str:
    """Return a duration for people.

    >>> write_seconds(3.21), write_seconds(75), write_seconds(7265), write_seconds(200000)
    ('3.2 s', '1 min 15 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, part, name in (("min", 60, 1, "s"), ("h", 3600, 60, "min")):
        if whole < size * (60 if unit == "min" else 24):
            return f"{whole // size} {unit} {whole % size // part} {name}"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def write_bytes(amount: float) -> str:
    """Return an amount of memory for people.

    >>> write_bytes(0), write_bytes(3 * 2**20), write_bytes(5 * 2**30)
    ('', '3 MiB', '5.0 GiB')
    """
    if not amount:
        return ""
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"


def write_clock() -> str:
    """Return the time of day."""
    return time.strftime("%H:%M:%S")
