# SPDX-License-Identifier: Apache-2.0
"""The worker of a stuck group that does not wait where the others wait. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .status import StuckWorker, WorkerStatus

FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
# The functions of the host that call a method or function of the user.
CALLERS = ("delegate", "iterate", "stream", "_fairlead_apply", "_fairlead_construct")
MOST_NAMED = 8

Frame = tuple[str, str, str]


def find_method_frames(stacks: str) -> tuple[Frame, ...]:
    """Return the frames of the thread that runs the user's method, innermost first, or of the first thread.

    >>> find_method_frames('''Thread 0x1 (most recent call first):
    ...   File "/lib/threading.py", line 320 in wait
    ...
    ... Current thread 0x2 (most recent call first):
    ...   File "/home/model.py", line 7 in step
    ...   File "/lib/fairlead_workergroup/_remote/host.py", line 200 in delegate
    ... ''')
    (('/home/model.py', '7', 'step'),)
    """
    threads: list[list[Frame]] = []
    for line in stacks.splitlines():
        if (frame := FRAME.fullmatch(line)) is not None:
            if threads:
                threads[-1].append((frame["file"], frame["line"], frame["function"]))
        elif line.rstrip().endswith("(most recent call first):"):
            threads.append([])
    for frames in threads:
        for index, (file, _, function) in enumerate(frames):
            if "fairlead_workergroup/_remote/" in file and function in CALLERS:
                return tuple(frames[:index])
    # faulthandler writes the newest thread first.
    return tuple(threads[-1]) if threads else ()


def find_innermost(stacks: str) -> str:
    """Return the innermost frame of the method as `file:line in function`; empty if it is unknown."""
    frames = find_method_frames(stacks)
    return f"{frames[0][0]}:{frames[0][1]} in {frames[0][2]}" if frames else ""


def add_odd_ranks(stuck: Sequence[StuckWorker], statuses: Mapping[int, WorkerStatus]) -> list[StuckWorker]:
    """Add notes that name the ranks that are not in the method and Python frames where most of the group waits."""
    places = {worker.rank: (worker.method, find_method_frames(worker.stacks)) for worker in stuck}
    ((place, count),) = Counter(places.values()).most_common(1) or [((None, ()), 0)]
    odd = [rank for rank in statuses if places.get(rank) != place]
    if place[0] is None or count < 2 or count <= len(odd) or not odd:
        return list(stuck)
    by_rank = {worker.rank: worker for worker in stuck}
    where = next((worker.where for worker in stuck if places[worker.rank] == place and worker.where), f"{place[0]!r}")
    named = "; ".join(_describe(statuses[rank], by_rank.get(rank)) for rank in odd[:MOST_NAMED])
    named += f"; and {len(odd) - MOST_NAMED} others" if len(odd) > MOST_NAMED else ""
    of_odd = f"{count} others wait at {where}, this rank does not"
    of_others = f"{count - 1} others wait at the same place; not there: {named}"
    return [
        replace(worker, note="; ".join(filter(None, (worker.note, of_odd if worker.rank in odd else of_others))))
        for worker in stuck
    ]


def _describe(status: WorkerStatus, stuck: StuckWorker | None) -> str:
    if stuck is not None and stuck.where:
        return f"rank {status.rank} at {stuck.where}"
    return f"rank {status.rank} {f'in {status.method!r}' if status.method else status.state}"
