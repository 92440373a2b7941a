# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the processes of this node: two looks, a moment apart. Shipped by value."""

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
    read_clock,
    read_counters,
    read_last_run,
    read_memory,
    read_stat,
    read_state,
    read_title,
    read_wait,
)
from .pyspy import MISSING, dump, find_pyspy
from .references import SAMPLE, calibrate
from .waits import SLEEP, WAITS_FOR_CHILD, read_kernel_wait

AT_A_TIME = 4
# Children of one process whose stacks are read, if it stands in code that waits for a child.
MOST_CHILDREN = 16
# The least time for the stacks of one node. Those that seem wrong come first.
DUMPS_S = 2.0
# A source line whose native call may wait for a device or for another rank. The line itself stays on the node.
WAITS_INSIDE = re.compile(
    r"\.(?:wait|item|cpu|tolist|numpy|synchronize|block_until_ready|wait_stream)\s*\(|[Ss]tore\w*\.\w+\s*\(|[Cc]omm\w*\.\w+\s*\("
)
# What `look` needs of a process, and does not return.
_OWN = ("started", "at", "counters")
_LATE_FILES = "a file system does not answer: records may be missing, and a wait for a device called code of the job"
_NO_CLOCK = "the kernel does not say when a thread ran last (/proc/PID/sched is missing)"


def look(
    pids: Sequence[int] | None, drivers: Sequence[int], window_s: float, timeout_s: float, offset: int | None = None
) -> dict[str, Any]:
    """Return what is known of processes of this node, which may lack Fairlead.

    With None for the workers, all that run here. The `offset` is that of the id in an `ObjectRef`: None to measure it,
    and -1 for no references. Returns the fields of each `Process` that lives, equal stacks as one object, and notes.
    """
    program, parents = find_pyspy(), list_processes()
    offset = calibrate(ray.ObjectRef(SAMPLE)) if offset is None else offset
    if pids is None:
        pids = [pid for pid in parents if read_title(pid).startswith("ray::")]
    begun = (_begin(pid, [] if pid in drivers else find_children(pid, parents)) for pid in {*pids, *drivers})
    rows = sorted(filter(None, begun), key=lambda row: row["states"][0] not in "TtDR")
    until, notes = time.monotonic() + max(DUMPS_S, (timeout_s - window_s) / 2), [] if program else [MISSING]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        dumps = pool.map(lambda row: (*dump(row["pid"], program, offset, until), time.monotonic()), rows)
        for row, dumped in zip(rows, dumps, strict=True):
            row["threads"], row["note"], row["dumped"] = dumped
        stayed = list(pool.map(lambda row: _look_again(row, program, offset, window_s, until + window_s), rows))
    rows = [row for row, lives in zip(rows, stayed, strict=True) if lives]
    _read_ages(rows)
    lines: dict[tuple[str, int], str] = {}
    # A file system that does not answer must not hold up the look.
    files = threading.Thread(target=_read_files, args=(rows, lines, notes), daemon=True)
    files.start()
    files.join(max(0.2, until + window_s - time.monotonic()))
    late = [_LATE_FILES] if files.is_alive() else []
    late += [_NO_CLOCK] if read_last_run("self", threading.get_native_id()) is None else []
    stacks: dict[Any, Any] = {}
    for row in rows:
        for thread in row["threads"]:
            for name in ("stack", "before"):
                thread[name] = stacks.setdefault(thread[name], thread[name])
            line = lines.get((thread["stack"][0][0], thread["stack"][0][2]), "")
            thread["waits_inside"] = bool(WAITS_INSIDE.search(line))
            if thread["waits_on"] == SLEEP and line and "sleep" not in line:
                thread["waits_on"] = "a timer of native code"  # such as SQLite's, which polls
    fields = [{name: value for name, value in row.items() if name not in _OWN} for row in rows]
    return {"processes": fields, "notes": [*notes, *late]}


def _begin(pid: int, children: Sequence[int]) -> dict[str, Any] | None:
    """Return the fields of a process as far as the first look knows them; None if it has ended."""
    try:
        state, _, ticks, started = read_stat(f"/proc/{pid}")
    except OSError:
        return None
    below = ((child, *read_state(child)) for child in children)
    return {
        "pid": pid,
        "title": read_title(pid),
        "states": (state, ""),
        "ticks": ticks,
        "environ": read_environ(pid),
        "children": [{"pid": child, "states": (state, ""), "ticks": ticks} for child, state, ticks in below if state],
        "records": [],
        "started": started,
        "at": time.monotonic(),
        "counters": {tid: read_counters(pid, tid) for tid in list_threads(pid)},
    }


def _look_again(row: dict[str, Any], program: str, offset: int, window_s: float, until: float) -> bool:
    """Add what the second look sees, and return whether the process still lives."""
    pid = row["pid"]
    time.sleep(max(0.0, row.pop("dumped") + window_s - time.monotonic()))
    try:
        state, _, ticks, started = read_stat(f"/proc/{pid}")
    except OSError:
        return False
    if started != row["started"]:
        return False
    states = (row["states"][0], state)
    row |= {"states": states, "ticks": ticks - row["ticks"], "window_s": time.monotonic() - row["at"]}
    row |= {"memory_bytes": read_memory(pid), "file": read_wait(pid) if states == ("D", "D") else ""}
    after = {thread["tid"]: read_counters(pid, thread["tid"]) for thread in row["threads"]}
    earlier: dict[int, Any] = {}
    if any(row["counters"].get(tid) != counters for tid, counters in after.items()):
        again, note = dump(pid, program, offset, until)
        if not note:
            earlier = {thread["tid"]: thread["stack"] for thread in row["threads"]}
            row["threads"] = again
    for thread in row["threads"]:
        tid = thread["tid"]
        thread |= {"before": earlier.get(tid), "waits_on": read_kernel_wait(pid, tid)}
        thread |= _compare(row["counters"].get(tid), after.get(tid))
    waits_below = any(WAITS_FOR_CHILD.search(frame[0]) for thread in row["threads"] for frame in thread["stack"][:8])
    for number, child in enumerate(row["children"]):
        state, ticks = read_state(child["pid"])
        child |= {"title": read_title(child["pid"]), "states": (child["states"][0], state)}
        child["ticks"] = ticks - child["ticks"]
        if waits_below and number < MOST_CHILDREN:
            child |= _look_into(child["pid"], program, until)
    row["children"] = [child for child in row["children"] if child["states"][1]]
    row["note"] = "" if row["threads"] else row["note"]
    return True


def _compare(first: tuple[str, Any, Any] | None, last: tuple[str, Any, Any] | None) -> dict[str, Any]:
    """Return the states of a thread in both looks, and its ticks and switches between them; None if not known."""
    pairs = [*zip(first or ("", None, None), last or ("", None, None), strict=True)]
    ticks, switches = (None if None in pair else pair[1] - pair[0] for pair in pairs[1:])
    return {"states": pairs[0], "ticks": ticks, "switches": switches}


def _look_into(child: int, program: str, until: float) -> dict[str, Any]:
    """Return the stack of the main thread of a child, empty if it is no Python, and what it waits for."""
    threads = dump(child, program, -1, until)[0] if program else []
    threads.sort(key=lambda thread: thread["tid"] != child)
    return {"stack": threads[0]["stack"] if threads else (), "waits_on": read_kernel_wait(child, child)}


def _read_files(rows: Sequence[dict[str, Any]], lines: dict[tuple[str, int], str], notes: list[str]) -> None:
    """Read the line at which each thread stands, which stays on the node, and the records of collectives."""
    for file, _, line in {thread["stack"][0] for row in rows for thread in row["threads"]}:
        lines[file, line] = linecache.getline(file, line)
    for row in rows:
        row["records"], note = read_dump(row["pid"], row["started"], row["environ"])
        notes += [note] if note else []


def _read_ages(rows: Sequence[dict[str, Any]]) -> None:
    """Add how long ago each thread and child ran last; None if that is not known. Each clock is read once."""
    clocks: dict[int, float | None] = {}

    def read_age(pid: int, tid: int) -> float | None:
        if (last := read_last_run(pid, tid)) is None:
            return None
        ran, processor = last
        if processor not in clocks:
            clocks[processor] = read_clock(processor)
        clock = clocks[processor]
        # A thread that the kernel has moved while it slept may have run by the clock of another one, and in the future.
        return None if clock is None or clock < ran else clock - ran

    for row in rows:
        for thread in row["threads"]:
            thread["last_ran_s"] = read_age(row["pid"], thread["tid"])
        for child in row["children"]:
            child["since_s"] = read_age(child["pid"], child["pid"])
