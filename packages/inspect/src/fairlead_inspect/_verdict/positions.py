# SPDX-License-Identifier: Apache-2.0
"""Where each process stands, and whether it moves."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .._model import Frame, Process, Stack, Thread

# A clock tick of the kernel, as of /proc/PID/stat.
TICKS_PER_S = 100
# A thread that ran for at most so many ticks between two looks, and stands where it stood, only woke up.
WAKING_TICKS = 2

# "device": in native code that may wait for a device or for another rank; opaque: its calls have no Python stack.
PositionKind = Literal["collective", "device", "ray-get", "user", "idle", "opaque", "unread"]
Motion = Literal["still", "waking", "spinning", "moving", "stopped", "disk", "unknown"]

_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_STANDARD = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen|/python3\d+\.zip/")
_RAY = re.compile(r"/ray/(?:_private|_raylet|util/tracing|actor|remote_function|_common|train/v2/_internal)")
_COLLECTIVE = re.compile(
    r"/torch/distributed/(?!elastic/|run\.py|launch\.py|launcher/)|/ray/util/collective/|/mpi4py/"
    r"|/jax/_src/(?:distributed|multihost)|/jax/experimental/multihost_utils|/deepspeed/comm/|/horovod/"
)
_RENDEZVOUS = re.compile(r"/torch/distributed/.*(?:rendezvous|init_process_group|_store_based_barrier)|init_collective")
# Native code of these waits for devices and for other ranks without a frame of its own.
_DEVICE = re.compile(r"/(?:torch|jax|jaxlib|cupy|tensorflow|nccl|mpi4py|deepspeed|vllm|sglang)/")
_GET = ("/ray/_private/worker.py", ("get", "wait", "get_objects"))
_GENERATOR = re.compile(r"/ray/_private/object_ref_generator\.py$|/ray/_raylet")
# Ray Train runs the user's function on a thread of its own; another one monitors it.
_TRAIN_THREAD = re.compile(r"/ray/train/v2/_internal/execution/worker_group/thread_runner\.py .*_run_target$")
# A server that waits for a request waits for somebody that nothing here can see.
_SERVES = re.compile(r"^(?:accept|serve_forever|_accept_connection)$")
_BASES = ("<module>", "_bootstrap", "_run_module_as_main", "actor_method_executor", "main_loop")


@dataclass(frozen=True)
class Position:
    """Where a process stands and whether it moves; `where` has no frames of Ray and of the standard library.

    Attributes:
        kind: what it does.
        motion: whether it moves.
        where: the frames by which positions are compared, innermost first.
        inner: the innermost frame, of any code, for people.
        thread: the thread that runs the task.
        since_s: seconds since that thread ran last; None if unknown.
        rendezvous: whether it waits for the others of its fleet to join.
        busy_elsewhere: whether other threads or children use the CPU or the disk.
    """

    kind: PositionKind
    motion: Motion = "unknown"
    where: Stack = ()
    inner: Frame | None = None
    thread: Thread | None = None
    since_s: float | None = None
    rendezvous: bool = False
    busy_elsewhere: bool = False


def locate(process: Process, *, driver: bool = False) -> Position:
    """Return where a process stands. A process whose threads say different things is `opaque`."""
    if process.note and not process.threads:
        return Position("unread", "stopped" if process.states[1] in "Tt" else "unknown")
    tasks = [one for one in process.threads if _runs_task(one, driver and one.tid == process.pid)]
    if not tasks:
        # A method without Python frames runs in a coroutine, or Ray runs a generator.
        runs = "." in process.title.partition("::")[2] or (driver and not process.threads)
        serves = any(one.name.startswith("AsyncIO Thread") for one in process.threads)
        return Position("opaque" if runs or serves else "idle", _move_of(process.states))
    found = [_locate(one, process.window_s) for one in tasks]
    waits = [one for one in found if one.kind in ("collective", "ray-get")]
    chosen = (waits or found)[0]
    if len(found) > 1 and (len(waits) > 1 or any(one.motion == "moving" for one in found)):
        chosen = next((one for one in found if one.motion == "moving"), Position("opaque", found[0].motion))
    own = (chosen.thread.ticks or 0) if chosen.thread else 0
    limit = max(WAKING_TICKS, 0.1 * TICKS_PER_S * process.window_s)
    elsewhere = process.ticks - own + sum(child.ticks for child in process.children) > limit
    elsewhere |= any(state in "RD" for child in process.children for state in child.states)
    motion: Motion = "stopped" if process.states[1] in "Tt" else chosen.motion
    return replace(chosen, motion=motion, busy_elsewhere=elsewhere)


def _locate(thread: Thread, window_s: float) -> Position:
    where, library, seen_own = normalise(thread.stack), [], False
    for frame in thread.stack:
        if _is_own(frame):
            seen_own = True
            break
        library.append(frame)
    inner = thread.stack[0] if thread.stack else None
    kind: PositionKind = "user"
    if any(_COLLECTIVE.search(frame.file) for frame in library):
        kind = "collective"
    elif any(_is_get(frame) for frame in library):
        kind = "ray-get"
    elif any(_GENERATOR.search(frame.file) or _SERVES.search(_last(frame.function)) for frame in library):
        kind = "opaque"
    elif not seen_own or thread.waits_inside or (inner is not None and _DEVICE.search(inner.file)):
        kind = "device"
    rendezvous = any(_RENDEZVOUS.search(f"{frame.file} {frame.function}") for frame in library)
    return Position(kind, _move(thread, window_s), where, inner, thread, thread.last_ran_s, rendezvous)


def _runs_task(thread: Thread, main: bool) -> bool:
    names = [_last(frame.function) for frame in thread.stack]
    if main or "actor_method_executor" in names:
        return True
    if any(_TRAIN_THREAD.search(f"{frame.file} {frame.function}") for frame in thread.stack):
        return True
    # A plain task, and a method that blocks the loop of an async actor.
    loops = "main_loop" in names or thread.name.startswith("AsyncIO Thread")
    return loops and any(_is_own(frame) for frame in thread.stack)


def _move_of(states: tuple[str, str]) -> Motion:
    return "stopped" if states[1] in "Tt" else "disk" if states == ("D", "D") else "unknown"


def _move(thread: Thread, window_s: float) -> Motion:
    if (outside := _move_of(thread.states)) != "unknown":
        return outside
    if thread.ticks is None or thread.switches is None:
        return "unknown"
    if not thread.ticks and not thread.switches:
        return "unknown" if "R" in thread.states else "still"  # on a busy machine it waits for a processor
    if thread.before is None:
        return "unknown"
    if normalise(thread.before) != normalise(thread.stack):
        # A torn stack proves nothing.
        return "moving" if is_complete(thread.before) and is_complete(thread.stack) else "unknown"
    if thread.ticks <= WAKING_TICKS and "R" not in thread.states:
        return "waking"
    return "spinning" if thread.states == ("R", "R") or thread.ticks > window_s * TICKS_PER_S / 2 else "moving"


def normalise(stack: Stack) -> Stack:
    """Return the frames by which positions are compared: the user's by line, those of packages by function."""
    return tuple(
        Frame(frame.file, frame.function, 0) if _PACKAGES.search(frame.file) else frame
        for frame in frames_of_code(stack)
    )


def frames_of_code(stack: Stack) -> Stack:
    """Return the frames that are neither Ray's nor those of the standard library."""
    return tuple(frame for frame in stack if not _STANDARD.search(frame.file) and not _RAY.search(frame.file))


def find_own(stack: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code, or of the package that stands for it."""
    own = [frame for frame in stack if _is_own(frame)]
    return next((frame for frame in own if not _PACKAGES.search(frame.file)), own[0] if own else None)


def is_complete(stack: Stack) -> bool:
    """Return whether a stack reaches the frame in which its thread began; one that was torn does not."""
    return bool(stack) and _last(stack[-1].function) in _BASES


def _is_get(frame: Frame) -> bool:
    return frame.file.endswith(_GET[0]) and _last(frame.function) in _GET[1]


def _is_own(frame: Frame) -> bool:
    """Return whether a frame is of the job: neither Python's, nor Ray's, nor of a library that waits inside."""
    return not any(pattern.search(frame.file) for pattern in (_STANDARD, _RAY, _COLLECTIVE, _DEVICE))


def _last(function: str) -> str:
    return function.rpartition(".")[2]
