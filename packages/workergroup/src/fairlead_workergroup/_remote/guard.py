# SPDX-License-Identifier: Apache-2.0
"""Ends workers of this machine that use too much memory. Shipped by value to the node agents: standard library only.

What a shipped function keeps in its module is gone with the call, so the guards are kept in a module of their own.
"""

import contextlib
import functools
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

from .host import start_tick
from .process import Mark, Process, Trees, kill_trees, read_marks, read_processes

__all__ = ["start_guard", "verdicts"]

EVERY_S = 0.2
# How often new children are looked for, which takes a look at every process of the machine.
LOOK_EVERY_S = 1.0
# How long one worker's processes may take to end; others are not watched meanwhile.
END_S = 5.0


def start_guard(workers: Sequence[tuple[int, int, str]], name: str, limit: int) -> list[bool]:
    """Watch workers, by pid, start tick and mark, until they have ended; which of them there are.

    Args:
        workers: whom.
        name: for whom, which `verdicts` is asked by.
        limit: bytes of memory of a worker and what it has started, without what is shared with others, such as values
            in the object store.
    """
    threading.Thread(target=_watch, args=(name, list(workers), limit), daemon=True, name="fairlead-guard").start()
    return [start_tick(pid) == started for pid, started, _ in workers]


def verdicts(processes: Sequence[Process], name: str) -> list[int | None]:
    """How many bytes each worker had when it was ended for it; None for one that was not."""
    ended = _ended(name)
    return [ended.get((pid, started)) for pid, started in processes]


def _ended(name: str) -> dict[Process, int]:
    kept: Any = sys.modules.setdefault("_fairlead_guards", types.ModuleType("_fairlead_guards"))
    ended: dict[Process, int] = kept.__dict__.setdefault(name, {})
    return ended


def _watch(name: str, workers: list[tuple[int, int, str]], limit: int) -> None:
    trees = {(pid, started): Trees([(pid, started)], [mark]) for pid, started, mark in workers}
    members: dict[Process, list[Process]] = {}
    marks: dict[Process, Sequence[Mark]] = {}
    measured = dict.fromkeys(trees, 0.0)
    looked = -LOOK_EVERY_S
    while trees := {worker: tree for worker, tree in trees.items() if start_tick(worker[0]) == worker[1]}:
        if (now := time.monotonic()) - looked >= LOOK_EVERY_S:
            looked = now
            processes = read_processes()
            seen = {(pid, started) for pid, (_, started) in processes.items()}
            marks = {one: found for one, found in marks.items() if one in seen}
            for worker, tree in trees.items():
                alive, children = tree.look(processes, functools.partial(_kept_marks, marks))
                members[worker] = [*alive, *children]
        for worker, tree in trees.items():
            # Forks share pages with their parent, which count once. That is dear to measure, so it comes second, and
            # not at every round.
            if sum(map(_private, members[worker])) <= limit or now - measured[worker] < LOOK_EVERY_S:
                continue
            measured[worker] = now
            used = sum(map(_proportional, members[worker]))
            if used > limit and start_tick(worker[0]) == worker[1]:
                # Before the kill: whoever sees the death must find the reason.
                _ended(name)[worker] = used
                kill_trees(tree, END_S)
        time.sleep(EVERY_S)


def _kept_marks(marks: dict[Process, Sequence[Mark]], process: Process) -> Sequence[Mark]:
    if process not in marks:
        marks[process] = read_marks(process)
    return marks[process]


def _private(process: Process) -> int:
    """Return the bytes of a process that are no file and nothing that is mapped as shared memory, in swap too."""
    return _sum_of_lines(process, "status", ("RssAnon:", "VmSwap:"))


def _proportional(process: Process) -> int:
    """Return the same, where a page that several processes share counts for each in part."""
    return _sum_of_lines(process, "smaps_rollup", ("Pss_Anon:", "SwapPss:")) or _private(process)


def _sum_of_lines(process: Process, file_name: str, names: tuple[str, ...]) -> int:
    pid, started = process
    size = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file_name}") as file:  # it may just have ended
        size = sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    return size if start_tick(pid) == started else 0
