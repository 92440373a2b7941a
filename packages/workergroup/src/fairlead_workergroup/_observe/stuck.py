# SPDX-License-Identifier: Apache-2.0
"""Which worker of a stuck group is not where the others are. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .status import StuckWorker, WorkerStatus

__all__ = ["add_odd_ranks", "find_innermost", "find_method_frames"]

FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
# The functions of the host that call a method or function of the user, or a fault of the test kit.
CALLERS = ("delegate", "stream", "_fairlead_apply", "_fairlead_run", "_fairlead_construct")
MOST_NAMED = 8

Frame = tuple[str, str, str]


def find_method_frames(stacks: str) -> tuple[Frame, ...]:
    """(file, line, function) of the frames from the innermost one to the user's method, of the thread that runs it.

    Args:
        stacks: of all threads, as faulthandler writes them.

    Returns:
        Those of the thread that was started first if none is seen to run a method; empty without frames.

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
        if (found := FRAME.fullmatch(line)) is not None:
            if threads:
                threads[-1].append((found["file"], found["line"], found["function"]))
        elif line.rstrip().endswith("(most recent call first):"):
            threads.append([])
    for frames in threads:
        for at, (file, _, function) in enumerate(frames):
            if file.endswith("fairlead_workergroup/_remote/host.py") and function in CALLERS:
                return tuple(frames[:at])
    # The newest thread comes first.
    return tuple(threads[-1]) if threads else ()


def find_innermost(stacks: str) -> str:
    """Where the method is, `file:line in function`; empty if nothing is known."""
    frames = find_method_frames(stacks)
    return f"{frames[0][0]}:{frames[0][1]} in {frames[0][2]}" if frames else ""


def add_odd_ranks(stuck: Sequence[StuckWorker], statuses: Mapping[int, WorkerStatus]) -> list[StuckWorker]:
    """The stuck workers, with a note for each when most of the group waits at one place: who does not.

    Two workers are at one place when they run one method and, as far as stacks are there, their Python stacks agree
    down to it: then they are in the same call, or at the same wait in it.

    Args:
        stuck: those without progress.
        statuses: of all workers that live, by rank.
    """
    places = {one.rank: (one.method, find_method_frames(one.stacks)) for one in stuck}
    ((place, count),) = Counter(places.values()).most_common(1) or [((None, ()), 0)]
    odd = [rank for rank in statuses if places.get(rank) != place]
    if place[0] is None or count < 2 or count <= len(odd) or not odd:
        return list(stuck)
    by_rank = {one.rank: one for one in stuck}
    where = next((one.where for one in stuck if places[one.rank] == place and one.where), f"{place[0]!r}")
    named = "; ".join(_doing(statuses[rank], by_rank.get(rank)) for rank in odd[:MOST_NAMED])
    named += f"; and {len(odd) - MOST_NAMED} others" if len(odd) > MOST_NAMED else ""
    told = []
    for one in stuck:
        if one.rank in odd:
            note = f"{count} others wait at {where}, this rank does not"
        else:
            note = f"{count - 1} others wait at the same place; not there: {named}"
        told.append(replace(one, note=f"{one.note}; {note}" if one.note else note))
    return told


def _doing(status: WorkerStatus, stuck: StuckWorker | None) -> str:
    if stuck is not None and stuck.where:
        return f"rank {status.rank} at {stuck.where}"
    return f"rank {status.rank} {f'in {status.method!r}' if status.method else status.state}"
