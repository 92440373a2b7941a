# SPDX-License-Identifier: Apache-2.0
"""Where each process stands, and whether it moves."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import dropwhile, takewhile
from typing import Literal

from .._node.pyspy import BASES
from .._node.references import is_get
from ..model import Frame, Process, Stack, Thread
from . import libraries

# A clock tick of the kernel, as in /proc/PID/stat.
TICKS_PER_S = 100
# A thread that ran for at most so many ticks between two snapshots, and stands where it stood, only woke up.
WAKING_TICKS = 2
# A thread that wakes up more often than this has traffic, as with a network, even if it stands at one line.
OFTEN_PER_S = 20
# A write to a disk may take so long.
SAVES_S = 60.0

# "device": in native code that may wait for a device or for another rank; "channel": for a peer of a compiled graph;
# "library": in a library of Ray, whose waits are not read; "opaque": its calls have no Python stack.
PositionKind = Literal[
    "collective", "device", "channel", "ray-get", "library", "user", "idle", "opaque", "unread"
]  # fmt: skip
Motion = Literal["still", "waking", "spinning", "moving", "stopped", "disk", "unknown"]
# The name of a thread on which an actor runs coroutines begins with this.
LOOP = "AsyncIO Thread"
# Kinds of threads that wait for other processes.
_WAITS = ("collective", "ray-get", "channel")
# Where a process with one of these motions stands, it stood in both snapshots.
STANDS = ("still", "waking", "spinning", "disk")


@dataclass(frozen=True)
class Position:
    """Where a process stands and whether it moves."""

    kind: PositionKind
    motion: Motion = "unknown"
    where: Stack = ()  # the frames by which positions are compared, without those of Ray and of the standard library
    inner: Frame | None = None  # the innermost frame, of any code, for people
    thread: Thread | None = None  # the thread that runs the task
    since_s: float | None = None  # seconds since that thread ran last; None if unknown
    rendezvous: bool = False  # whether it waits for the others of its worker set to join
    paused: bool = False  # whether it is at a breakpoint, to which no debugger is attached
    backward: bool = False  # whether it computes gradients, which distributed models reduce there
    busy_elsewhere: bool = False  # whether other threads or children use the CPU or the disk
    mixed: bool = False  # whether other threads wait or run calls too, so that this may not be what it waits in
    loops: bool = False  # whether it moves within one function

    @property
    def moves(self) -> bool:
        """Whether it was seen to make progress."""
        return self.motion == "moving" or self.busy_elsewhere

    @property
    def stands(self) -> bool:
        """Whether it was at one place in both snapshots, and nothing else of it works."""
        return self.motion in STANDS and not self.busy_elsewhere


def locate(process: Process, *, driver: bool = False) -> Position:
    """Return where a process stands. A process whose threads say different things is `opaque`."""
    if process.note and not process.threads:
        return Position("unread", _move_of(process.states, process.ticks))
    tasks, others = list[Position](), list[Position]()
    for thread in process.threads:
        runs = _runs_task(thread, driver and thread.tid == process.pid)
        (tasks if runs else others).append(_locate(thread, process.window_s))
    # A library waits for the thread on which it runs code of the job.
    beside = [] if driver else [place for place in others if _is_of_job(place)]
    tasks = [place for place in tasks if place.kind != "library"] or (tasks and beside) or tasks
    others = [other for other in others if other not in tasks]
    waits_aside = any(place.kind in _WAITS for place in others)
    if not tasks:
        return Position(_without_task(process, others, driver=driver), _move_of(process.states, process.ticks))
    waits = [task for task in tasks if task.kind in _WAITS]
    chosen = next((place for place in tasks if place.motion == "moving"), (waits or tasks)[0])
    apart = len(waits) > 1 or (not waits and len({place.where for place in tasks}) > 1)
    # Calls of one actor may wait for each other, if all of them stand in code of the job.
    rest = not waits_aside and all(place.kind == "user" and place.motion == "still" for place in tasks)
    if chosen.motion != "moving" and ((apart and not rest) or (chosen.kind == "user" and waits_aside)):
        chosen = replace(chosen, kind="opaque")
    elif rest:
        chosen = min(tasks, key=lambda place: place.since_s or 0.0)
    own_ticks = (chosen.thread.ticks or 0) if chosen.thread else 0
    limit = max(WAKING_TICKS, 0.1 * TICKS_PER_S * process.window_s)
    aside = [place for place in (*tasks, *others) if place.thread is not chosen.thread]
    elsewhere = process.ticks - own_ticks > limit or any(_works(place, process.window_s) for place in aside)
    elsewhere |= any(child.ticks > WAKING_TICKS or {*child.states} & {*"RD"} for child in process.children)
    if _move_of(process.states, process.ticks) == "stopped":
        chosen = replace(chosen, motion="stopped")
    return replace(chosen, mixed=(len(tasks) > 1 and not rest) or waits_aside, busy_elsewhere=elsewhere)


def _without_task(process: Process, others: Iterable[Position], *, driver: bool) -> PositionKind:
    """Return "opaque" for a process without a thread that runs a call, if something else of it may run one."""
    # A method without Python frames runs in a coroutine, or Ray runs a generator, or a thread of the job does it.
    runs = "." in process.title.partition("::")[2] or (driver and not process.threads)
    serves = any(thread.name.startswith(LOOP) for thread in process.threads)
    works = any(map(_is_of_job, others))
    return "opaque" if runs or serves or works else "idle"


def _is_of_job(place: Position) -> bool:
    """Return whether a thread stands in code of the job itself, and not of a package."""
    return (own := find_own(place.where)) is not None and not libraries.shows(libraries.PACKAGES, own)


def _works(place: Position, window_s: float) -> bool:
    """Return whether a thread of the job beside the chosen one works, if only by waking up often, as with a network."""
    often = place.thread is not None and (place.thread.switches or 0) > 10 * window_s
    saves = place.motion == "disk" and (place.since_s or 0.0) < SAVES_S
    return (often or saves or place.motion in ("moving", "spinning")) and find_own(place.where) is not None


def _locate(thread: Thread, window_s: float) -> Position:
    place, motion = _read(thread.stack, thread.waits_inside), _move(thread, window_s)
    loops = motion == "moving" and _is_one_function(normalise(thread.before or ()), place.where)
    return replace(place, motion=motion, thread=thread, since_s=thread.last_ran_s, loops=loops)


def _is_one_function(before: Stack, after: Stack) -> bool:
    """Return whether two positions are in one call of a function of the job, at any of its lines."""
    first, second = (
        tuple(dropwhile(lambda frame: libraries.shows(libraries.PACKAGES, frame), stack)) for stack in (before, after)
    )
    return bool(first and second) and replace(first[0], line=second[0].line) == second[0] and first[1:] == second[1:]


@lru_cache(4096)
def _read(stack: Stack, waits_inside: bool) -> Position:
    """Return what a stack says; most threads of a job stand at few places."""
    inside = tuple(takewhile(lambda frame: not libraries.is_own(frame), stack))
    kind: PositionKind = "user"
    paused = libraries.shows(libraries.BREAKPOINT, *stack)
    if libraries.shows(libraries.COLLECTIVE, *inside):
        kind = "collective"
    elif any(is_get(frame.file, frame.function) for frame in inside):
        kind = "ray-get"
    elif libraries.shows(libraries.CHANNEL, *inside):
        kind = "channel"
    elif paused:
        kind = "user"
    elif any(map(libraries.is_server, stack[: len(inside) + 1])):
        kind = "opaque"
    elif waits_inside or libraries.shows(libraries.DEVICE, *stack[:1]):
        kind = "device"
    elif len(inside) == len(stack) or libraries.shows(libraries.RAY, *inside):
        kind = "library"
    rendezvous, backward = libraries.shows(libraries.RENDEZVOUS, *inside), libraries.shows(libraries.BACKWARD, *inside)
    # `Queue.get` says more than the condition with which it waits.
    skipped = len(inside) > 1 and libraries.shows(libraries.CONDITION, stack[0])
    inner = stack[skipped] if stack else None
    return Position(kind, where=normalise(stack), inner=inner, rendezvous=rendezvous, paused=paused, backward=backward)


def _runs_task(thread: Thread, main: bool) -> bool:
    names = [libraries.last_name(frame.function) for frame in thread.stack]
    if main or "actor_method_executor" in names:
        return True
    if libraries.shows(libraries.USER_THREADS, *thread.stack):
        return True
    # A plain task, and a method that blocks the loop of an async actor.
    loops = "main_loop" in names or thread.name.startswith(LOOP)
    return loops and any(libraries.is_own(frame) for frame in thread.stack)


def _move_of(states: tuple[str, str], ticks: int | None) -> Motion:
    """Return what the states in both snapshots say; they are empty if the thread was missing in one of them."""
    return "stopped" if {*states} <= {*"Tt"} and not ticks else "disk" if states == ("D", "D") else "unknown"


def _move(thread: Thread, window_s: float) -> Motion:
    if (outside := _move_of(thread.states, thread.ticks)) != "unknown":
        return outside
    if thread.ticks is None or thread.switches is None:
        return "unknown"
    if not thread.ticks and not thread.switches:
        return "unknown" if "R" in thread.states else "still"  # on a busy machine it waits for a processor
    if thread.before is None:
        return "unknown"
    if normalise(thread.before) != normalise(thread.stack):
        # A torn stack, which does not reach the frame in which its thread began, proves nothing.
        ends = {libraries.last_name(frame.function) for stack in (thread.before, thread.stack) for frame in stack[-1:]}
        return "moving" if thread.before and thread.stack and ends <= {*BASES} else "unknown"
    if thread.ticks <= WAKING_TICKS and "R" not in thread.states:
        return "waking"
    return "spinning" if thread.states == ("R", "R") or thread.ticks > window_s * TICKS_PER_S / 2 else "moving"


def normalise(stack: Stack) -> Stack:
    """Return the frames by which positions are compared: the user's by line, those of packages by function."""
    return tuple(
        Frame(frame.file, frame.function, 0) if libraries.shows(libraries.PACKAGES, frame) else frame
        for frame in frames_of_code(stack)
    )


def frames_of_code(stack: Stack) -> Stack:
    """Return the frames that are neither Ray's nor those of the standard library."""
    return tuple(frame for frame in stack if not libraries.is_library(frame))


def find_own(stack: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code, or of the package that stands for it."""
    own = [frame for frame in stack if libraries.is_own(frame)]
    return next((frame for frame in own if not libraries.shows(libraries.PACKAGES, frame)), own[0] if own else None)
