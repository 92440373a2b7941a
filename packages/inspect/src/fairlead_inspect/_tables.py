# SPDX-License-Identifier: Apache-2.0
"""Groups and workers as tables for a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairlead_placement.spi import group_pairs

from ._diagnosis import Finding, common_coords, write_coords
from ._groups import SeenGroup, SeenWorker
from ._show import make_table, write_ranks, write_seconds
from ._stacks import FoldedStack

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
    table = make_table("group", "mesh", "alive", "dead", "stuck", "memory", "age", flexible=["class", "driver"])
    for seen in groups:
        group, driver = seen.group, seen.group.driver
        orphaned = "orphaned: its driver is gone" if seen.driver == "gone" else ""
        who = f"pid {driver['pid']} on {driver['host']}, job {driver['job_id']}"
        table.add_row(
            Text(group.label),
            Text(" ".join(f"{axis}={size}" for axis, size in group.shape.items())),
            Text(str(len(seen.workers) - seen.count("dead", "unknown"))),
            _number(seen.count("dead"), "dead"),
            _number(seen.count("stuck"), "stuck"),
            Text(write_bytes(sum(worker.memory_bytes for worker in seen.workers))),
            Text(write_seconds(seen.age_s)),
            Text(group.class_name),
            Text(orphaned or (f"{who} (stopped)" if seen.driver == "stopped" else who)),
        )
    return table


def _number(count: int, state: str) -> Text:
    return Text(str(count), style=_STYLES[state] if count else "")


def draw_status(seen: SeenGroup, *, every: bool = False) -> RenderableType:
    """Return a table with a line for each worker; of more than `MOST_ROWS`, one for those that do the same."""
    alike = [[worker] for worker in seen.workers]
    if not every and len(alike) > MOST_ROWS:
        alike = _fold(seen.workers)
    columns = ["rank", "at", "node", "pid", "state", "method", "for", "step", "memory"]
    has_weights = any(one.weights is not None for one in seen.workers)
    table = make_table(*columns, *(["weights"] if has_weights else []), flexible=["message"])
    for workers in alike:
        *cells, message = _cells(workers)
        table.add_row(*cells, *([_write_weights(workers)] if has_weights else []), message)
    group = seen.group
    head = Text(f"{group.label}: {group.class_name}, {write_coords(group.shape)}, {len(seen.workers)} workers", "bold")
    states = {one: seen.count(one) for one in ("busy", "idle", "starting", "stuck", "dead", "unknown")}
    counted = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    notes = [
        Text(f"{_name_ranks([one.rank for one in workers])}: {workers[0].note}")
        for workers in alike
        if workers[0].note and not workers[0].method
    ]
    return Group(head, Text(f"{counted}; driver {seen.driver}; {write_seconds(seen.age_s)} old"), table, *notes)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {write_ranks(ranks)}"


def _fold(workers: Sequence[SeenWorker]) -> list[list[SeenWorker]]:
    found = group_pairs(
        ((one.state, one.stopped, one.method, one.step, one.message, one.weights, one.incarnation, one.note), one)
        for one in workers
    )
    return sorted(found.values(), key=lambda alike: alike[0].rank)


def _cells(workers: Sequence[SeenWorker]) -> list[Text]:
    first = workers[0]
    state = "stopped" if first.stopped else first.state
    nodes = sorted({worker.node_id[:8] for worker in workers if worker.node_id})
    again = f" ({first.incarnation} restarts)" if first.incarnation else ""
    return [
        Text(write_ranks([one.rank for one in workers])),
        Text(" ".join(f"{axis}={at}" for axis, at in common_coords(workers).items())),
        Text(nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else ""),
        Text((str(first.pid) if first.pid else "") if len(workers) == 1 else f"{len(workers)} pids"),
        Text(state + again, style=_STYLES.get(state, "")),
        Text(first.method or ""),
        Text(_range([one.running_s for one in workers], write_seconds) if first.method else ""),
        Text("" if first.step is None else str(first.step)),
        Text(_range([float(one.memory_bytes) for one in workers], write_bytes)),
        Text(first.message, no_wrap=True, overflow="ellipsis"),
    ]


def _write_weights(workers: Sequence[SeenWorker]) -> Text:
    """Return the version of the weights and their age; workers of one line have the same version."""
    version = workers[0].weights
    return Text(
        "" if version is None else f"{version}, {_range([one.weights_age_s for one in workers], write_seconds)}"
    )


def _range(values: Sequence[float], write: object) -> str:
    low, high = write(min(values)), write(max(values))  # type: ignore[operator]
    return str(low) if low == high else f"{low} - {high}"


def draw_stacks(folded: Sequence[FoldedStack]) -> RenderableType:
    """Return the distinct stacks, each under its ranks."""
    parts: list[RenderableType] = []
    for one in folded:
        parts.append(Text(f"{_name_ranks(one.ranks)}:", style="bold"))
        parts += [Text("  " + line) for line in one.stacks.splitlines()]
    return Group(*parts)


def draw_findings(seen: SeenGroup, findings: Sequence[Finding]) -> RenderableType:
    """Return the diagnosis of a group."""
    group = seen.group
    wrong = any(finding.wrong for finding in findings)
    verdict = "something is wrong" if wrong else "nothing is wrong"
    head = f"{group.label}: {group.class_name}, {write_coords(group.shape)}, {len(seen.workers)} workers: {verdict}"
    parts: list[RenderableType] = [Text(head, style="bold red" if wrong else "bold green")]
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column()
    for finding in findings:
        name = _HEADS.get(finding.kind, finding.kind.upper())
        style = _STYLES.get(finding.kind, "bold red" if finding.wrong else "")
        stacks = Text(f"\n{finding.stacks}" if finding.stacks else "", style="dim")
        rows.add_row(Text(name, style=style), Text.assemble(finding.text, stacks))
    parts.append(rows)
    if not findings:
        busy = [one for one in seen.workers if one.method]
        doing = f"{len(busy)} of {len(seen.workers)} workers run a method" if busy else "All workers are idle"
        parts.append(Text(f"{doing}; none of them is elsewhere than its peers for long."))
    return Group(*parts)


def write_bytes(amount: float) -> str:
    """Return an amount of memory for people.

    >>> write_bytes(0), write_bytes(3 * 2**20), write_bytes(5 * 2**30)
    ('', '3 MiB', '5.0 GiB')
    """
    if not amount:
        return ""
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"
