# SPDX-License-Identifier: Apache-2.0
"""Two looks at the processes of this node, a moment apart. Shipped by value."""

import linecache
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from .collectives import read_dump
from .environ import read_environ
from .processes import (
    find_children,
    list_processes,
    list_threads,
    map_threads,
    read_clock,
    read_counters,
    read_last_run,
    read_memory,
    read_stat,
    read_title,
    read_wait,
)
from .pyspy import MISSING, dump, find_pyspy
from .references import SAMPLE, calibrate
from .waits import SLEEP, read_kernel_wait

AT_A_TIME = 4
# Children of one process whose stacks are read, if it stands in code that waits for a child.
MOST_CHILDREN = 16
WAITS_FOR_CHILD = re.compile(
    r"/multiprocessing/|/subprocess\.py$|/torch/utils/data/|/concurrent/futures/process|/joblib/|/loky/"
)
# The least time for the stacks of one node. Those that seem wrong come first.
DUMPS_S = 2.0
# A source line whose native call may wait for a device or for another rank. The line itself stays on the node.
WAITS_INSIDE = re.compile(
    r"\.(?:wait|item|cpu|tolist|numpy|synchronize|block_until_ready|wait_stream)\s*\(|[Ss]tore\w*\.\w+\s*\(|[Cc]omm\w*\.\w+\s*\("
)


def look_from_task(pids: list[int], drivers: list[int], window_s: float, timeout_s: float) -> dict[str, Any]:
    """Look at processes of this node. Also the task of a probe, whose node may lack Fairlead."""
    return look(pids, drivers, window_s, calibrate(ray.ObjectRef(SAMPLE)), timeout_s)


def look(
    pids: Sequence[int] | None, drivers: Sequence[int], window_s: float, offset: int, timeout_s: float
) -> dict[str, Any]:
    """Return what is known of processes of this node, or with None of all workers of Ray and of given drivers.

    The stacks get half of the time that is not for the window; the rest is for the start and the answer of the task.

    Returns:
        `processes`: the fields of each living one, with frames as indices of `stacks`; `notes`: the missing parts
        here; `took_s`.
    """
    began, program, parents = time.monotonic(), find_pyspy(), list_processes()
    if pids is None:
        pids = [pid for pid in parents if read_title(pid).startswith("ray::")]
    rows = [
        row for pid in dict.fromkeys([*pids, *drivers]) if (row := _begin(pid, parents, pid in drivers)) is not None
    ]
    rows.sort(key=lambda row: row["states"][0] not in "TtDR")
    until, notes = time.monotonic() + max(DUMPS_S, (timeout_s - window_s) / 2), [] if program else [MISSING]
    # A file system that does not answer must not hold up the look.
    reader = threading.Thread(target=_read_records, args=(rows, notes), daemon=True)
    reader.start()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(lambda row: _dump(row, program, offset, until), rows))
        list(pool.map(lambda row: _look_again(row, program, offset, window_s, until + window_s), rows))
    lines: dict[tuple[str, int], str] = {}
    sources = threading.Thread(target=_read_lines, args=(rows, lines), daemon=True)
    sources.start()
    for one in (reader, sources):
        one.join(max(0.2, until + window_s - time.monotonic()))
    clocks: dict[int, float | None] = {}
    table: dict[Any, int] = {}
    found = [_finish(row, clocks, table, lines) for row in rows if not row.get("gone")]
    if sources.is_alive():
        notes.append(
            "the file system of the sources does not answer: a wait for a device may be called code of the job"
        )
    if read_last_run("self", threading.get_native_id()) is None:
        notes.append("the kernel does not say when a thread ran last (/proc/PID/sched is missing)")
    return {"processes": found, "stacks": list(table), "notes": [*notes], "took_s": time.monotonic() - began}


def _begin(pid: int, parents: dict[int, int], driver: bool) -> dict[str, Any] | None:
    try:
        state, _, ticks, started = read_stat(f"/proc/{pid}")
    except OSError:
        return None
    children = {} if driver else {one: _read_child(one) for one in find_children(pid, parents)}
    return {
        "pid": pid,
        "started": started,
        "states": [state],
        "ticks": [ticks],
        "at": [time.monotonic()],
        "title": read_title(pid) or "",
        "environ": read_environ(pid),
        "memory": read_memory(pid),
        "records": [],
        "children": children,
        "counters": {tid: read_counters(pid, tid) for tid in list_threads(pid)},
    }


def _read_child(pid: int) -> tuple[str, int]:
    try:
        state, _, ticks, _ = read_stat(f"/proc/{pid}")
    except OSError:
        return "", 0
    return state, ticks


def _read_records(rows: Sequence[dict[str, Any]], notes: list[str]) -> None:
    for row in rows:
        row["records"], note = read_dump(row["pid"], row["started"], row["environ"])
        notes += [note] if note else []


def _read_lines(rows: Sequence[dict[str, Any]], lines: dict[tuple[str, int], str]) -> None:
    """Read the line at which each thread stands. The lines stay on the node."""
    for row in rows:
        for thread in row["threads"]:
            file, _, line = thread["stack"][0]
            if (file, line) not in lines:
                lines[file, line] = linecache.getline(file, line)


def _dump(row: dict[str, Any], program: str, offset: int, until: float) -> None:
    row["threads"], row["note"] = dump(row["pid"], program, offset, until)
    row["dumped"] = time.monotonic()


def _look_again(row: dict[str, Any], program: str, offset: int, window_s: float, until: float) -> None:
    pid = row["pid"]
    time.sleep(max(0.0, row["dumped"] + window_s - time.monotonic()))
    try:
        state, _, ticks, started = read_stat(f"/proc/{pid}")
    except OSError:
        state, ticks, started = "", row["ticks"][0], 0
    if started != row["started"]:
        row["gone"] = True
        return
    row["states"].append(state)
    row["ticks"].append(ticks)
    row["at"].append(time.monotonic())
    # py-spy gives their numbers in the namespace of the process.
    is_known = all(thread["tid"] in row["counters"] for thread in row["threads"])
    names = {} if is_known else map_threads(pid)
    for thread in row["threads"]:
        thread["tid"] = names.get(thread["tid"], thread["tid"])
    row["after"] = {thread["tid"]: read_counters(pid, thread["tid"]) for thread in row["threads"]}
    row["children_after"] = {one: _read_child(one) for one in row["children"]}
    if any(row["counters"].get(tid) != after for tid, after in row["after"].items()):
        again, note = dump(pid, program, offset, until)
        before = {thread["tid"]: thread["stack"] for thread in row["threads"]}
        for thread in again:
            thread["tid"] = names.get(thread["tid"], thread["tid"])
            thread["before"] = before.get(thread["tid"])
        if not note:
            row["threads"] = again
    for thread in row["threads"]:
        thread["waits_on"] = read_kernel_wait(pid, thread["tid"])
    if any(WAITS_FOR_CHILD.search(frame[0]) for thread in row["threads"] for frame in thread["stack"][:8]):
        row["inside"] = {one: _look_into(one, program, until) for one in [*row["children"]][:MOST_CHILDREN]}


def _look_into(child: int, program: str, until: float) -> tuple[list[Any], str]:
    """Return the stack of the main thread of a child, empty if it is no Python, and what it waits for."""
    threads = dump(child, program, -1, until)[0] if program else []
    main = next((one["stack"] for one in threads if one["tid"] == child), threads[0]["stack"] if threads else [])
    return main, read_kernel_wait(child, child)


def _finish(
    row: dict[str, Any], clocks: dict[int, float | None], table: dict[Any, int], lines: dict[tuple[str, int], str]
) -> tuple[Any, ...]:
    """Return the fields of a process, with the differences between both looks, and its stacks as indices."""
    pid, threads = row["pid"], []
    for thread in row["threads"]:
        tid, stack, before = thread["tid"], tuple(thread["stack"]), thread.get("before")
        first, last = (row[look].get(tid, ("", None, None)) for look in ("counters", "after"))
        file, _, line = stack[0]
        threads.append((
            tid,
            thread["name"],
            table.setdefault(stack, len(table)),
            -1 if before is None else table.setdefault(tuple(before), len(table)),
            (first[0], last[0]),
            _subtract(last[1], first[1]),
            _subtract(last[2], first[2]),
            _read_age(pid, tid, clocks),
            bool(WAITS_INSIDE.search(lines.get((file, line), ""))),
            thread["references"],
            thread["unread"],
            _name_sleep(thread.get("waits_on", ""), lines.get((file, line), "")),
        ))  # fmt: skip
    children = [
        (
            child, read_title(child), (state, after[0]), after[1] - ticks,
            *row.get("inside", {}).get(child, ([], "")), _read_age(child, child, clocks),
        )
        for child, (state, ticks) in row["children"].items()
        if (after := row["children_after"][child])[0]
    ]  # fmt: skip
    states, note = tuple(row["states"]), row["note"] if not threads else ""
    file = read_wait(pid) if states == ("D", "D") else ""
    return (pid, row["title"], states, row["ticks"][1] - row["ticks"][0], row["at"][1] - row["at"][0], threads,
            row["environ"], children, row["memory"], note, file, row["records"])  # fmt: skip


def _name_sleep(waits_on: str, line: str) -> str:
    """Return what a thread waits for; a library that polls sleeps without a line that says so, as SQLite does."""
    return "a timer of native code" if waits_on == SLEEP and line and "sleep" not in line else waits_on


def _read_age(pid: int, tid: int, clocks: dict[int, float | None]) -> float | None:
    """Return how long ago a thread ran last; None if that is not known. Each processor's clock is read once.

    A thread that the kernel has moved while it slept may have run by the clock of another processor, and in the future.
    """
    if (last := read_last_run(pid, tid)) is None:
        return None
    ran, processor = last
    if processor not in clocks:
        clocks[processor] = read_clock(processor)
    clock = clocks[processor]
    return None if clock is None or clock < ran else clock - ran


def _subtract(last: int | None, first: int | None) -> int | None:
    return None if last is None or first is None else last - first
