# SPDX-License-Identifier: Apache-2.0
"""An agent of NIXL, which reads memory of other processes over InfiniBand, over TCP or within a node.

Seen of nixl-cu12 1.5.1 with host memory: Within a node a transfer is done when `transfer` returns, so reads are cut for
the deadline to mean something. A dead source shows as an exception or as the state "ERR". A transfer that
is released before it has ended goes on writing, so none is. NIXL's own progress thread keeps a core busy all the time,
and makes TCP slower than a thread that sleeps between its looks. A process that was stopped, and continues after a
process that read from it over TCP has died, is aborted by UCX. So is, in one of ten cases, a process that drops its
agent after a process that it read from has died, unless it lets UCX make progress after it has disconnected. Over TCP,
a process answers reads out of its memory when it makes progress, and crashes if that memory has been given back.

Seen of nixl-cu13 1.5.1 with memory of one H200: UCX opens the memory of the other process while it copies (CUDA IPC).
The first allocation that it opens of a process stays open as long as that is connected. Memory of torch's
`expandable_segments` cannot be opened, and goes over TCP.
"""

import atexit
import importlib
import importlib.util
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .entry import find_shared
from .tensors import Run, span
from .transport import Blocked, Late, Lost

logger = logging.getLogger(__name__)

# The wheel for CUDA 12 or for CUDA 13; both work without a GPU.
MODULES = "nixl_cu12", "nixl_cu13"
# By default UCX reads memory of a GPU without NVLink over TCP (NIXL after 1.5 sets this too: ai-dynamo/nixl#2208), and
# keeps memory open after a copy, which is not free then. Variables such as UCX_CUDA_IPC_CACHE take precedence.
UCX = "CUDA_IPC_ENABLE_GET_ZCOPY=on,CUDA_IPC_CACHE=n"
# The most bytes of one read. A transfer has at most twice as many, 64 MiB.
READ_BYTES = 32 << 20
# Seconds between two looks for the reads of others: while a send runs, and later, for reads that are late. Over TCP,
# 0.1 ms is not faster than 1 ms, but takes an eighth of a core from each source.
BUSY_S, IDLE_S = 1e-3, 1e-2
# Seconds between two looks for registered memory that has been freed.
FREED_S = 1.0


def explain_missing() -> str:
    """Return why this process cannot use NIXL; an empty text if it can."""
    for name in MODULES:
        if importlib.util.find_spec(name) is not None:
            return ""
    return f"its Python has no {' or '.join(MODULES)}: install fairlead-transfer[nixl] there"


def collapse(
    sizes: Sequence[int], itemsize: int, first: Sequence[int], second: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Return how two tensors of the same sizes consist of runs that are dense in both.

    Args:
        sizes: of both.
        itemsize: bytes of an element.
        first: the strides of one in bytes.
        second: the strides of the other in bytes.

    Returns:
        The bytes of a run; and for each dim over the runs, from the innermost: its size, and both strides.

    >>> collapse((4, 2, 8), 2, (64, 16, 2), (32, 16, 2))
    (32, [(4, 64, 32)])
    """
    length, dims = itemsize, list[tuple[int, int, int]]()
    for size, one, other in zip(reversed(sizes), reversed(first), reversed(second), strict=True):
        if size == 1:
            continue
        if not dims and one == other == length:
            length *= size
        elif dims and (one, other) == (dims[-1][0] * dims[-1][1], dims[-1][0] * dims[-1][2]):
            dims[-1] = (dims[-1][0] * size, *dims[-1][1:])
        else:
            dims.append((size, one, other))
    return length, dims


def dense(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a tensor in one piece."""
    return tuple(itemsize * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


@dataclass
class _Registration:
    """Memory that others can read, or that this process reads into."""

    ranges: list[tuple[str, int, int]]
    handles: list[Any]
    tensors: list[Any]  # which are in use now
    # Whether the memory still exists, for each tensor; None if that is unknown.
    watches: list[Callable[[], bool] | None]

    def is_freed(self) -> bool:
        """Whether some of the memory is not that of the tensors any more, or may not be."""
        return not self.tensors and not all(watch is not None and watch() for watch in self.watches)


class Agent:
    """NIXL in this process for one end of a link: registered memory, and the processes that it reads from.

    Attributes:
        name: of this agent only, so that a worker that was started again is another agent.

    Raises:
        Blocked: NIXL cannot be used here; says why.
    """

    def __init__(self) -> None:
        if reason := explain_missing():
            raise Blocked(reason)
        name = next(name for name in MODULES if importlib.util.find_spec(name) is not None)
        try:
            api = importlib.import_module(f"{name}._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self.name = f"fairlead-transfer-{uuid.uuid4().hex}"
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
            self._nixl = api.nixl_agent(self.name, config)
            self._nixl.create_backend("UCX", {"engine_config": UCX})
        except Exception as error:
            raise Blocked(f"{name} cannot be used: {type(error).__name__}: {error}") from error
        # By owner. The lock is for the thread that gives back what has been freed.
        self._registered: dict[Any, _Registration] = {}
        self._registering = threading.RLock()
        self._peers: dict[int, tuple[str, bytes]] = {}
        self._pause_s = IDLE_S
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # If Python ends a thread of its own inside NIXL's C++, the process is aborted.
        atexit.register(self._stop)

    def serve(self, *, busy: bool) -> None:
        """Answer the reads of others in a thread; at once, or later if no send is running."""
        self._pause_s = BUSY_S if busy else IDLE_S
        if busy and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._answer, name="fairlead-transfer nixl", daemon=True)
            self._thread.start()

    def _stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        # UCX closes connections as it makes progress, and aborts if it is ended before that.
        self._nixl.get_new_notifs()

    def _answer(self) -> None:
        looked = time.monotonic()
        while not self._stopping.wait(self._pause_s):
            self._nixl.get_new_notifs()
            if time.monotonic() - looked > FREED_S:
                looked = time.monotonic()
                self._give_back_freed()

    def _give_back_freed(self) -> None:
        with self._registering:
            for owner in [owner for owner, one in self._registered.items() if one.is_freed()]:
                self.deregister(owner)

    def register(self, owner: Any, tools: Any, tensors: Sequence[Any]) -> None:
        """Register the memory of tensors, in place of what this owner has registered before."""
        ranges: list[tuple[str, int, int]] = []
        for device, begin, end in sorted({span(tools, tensor) for tensor in tensors}):
            if ranges and ranges[-1][0] == device and begin < ranges[-1][2]:
                ranges[-1] = (device, ranges[-1][1], max(end, ranges[-1][2]))
            else:
                ranges.append((device, begin, end))
        with self._registering:
            known = self._registered.get(owner)
            if known is None or known.ranges != ranges or known.is_freed():
                self.deregister(owner)
                handles = []
                for device in {one[0] for one in ranges}:
                    regions = [(begin, end - begin, _number(device), "") for at, begin, end in ranges if at == device]
                    handles.append(self._nixl.register_memory(regions, _kind(device)))
                known = _Registration(ranges, handles, [], [])
            known.tensors, known.watches = list(tensors), [tools.watch(tensor) for tensor in tensors]
            self._registered[owner] = known

    def hold(self, owner: Any, tensors: Sequence[Any]) -> bool:
        """Keep tensors until `let_go`; return False if their memory is not registered, also if it was freed."""
        with self._registering:
            known = self._registered.get(owner)
            if known is None or known.is_freed():
                return False
            known.tensors = list(tensors)
            return True

    def held(self, owner: Any) -> list[Any]:
        """Return the tensors of an owner that are kept."""
        with self._registering:
            known = self._registered.get(owner)
            return [] if known is None else known.tensors

    def let_go(self, owner: Any) -> None:
        """Keep the tensors of an owner no longer: their memory stays registered as long as it exists."""
        with self._registering:
            if (known := self._registered.get(owner)) is not None:
                known.tensors = []
                if None in known.watches:
                    self.deregister(owner)

    def deregister(self, owner: Any) -> None:
        """Give back what an owner has registered."""
        with self._registering:
            known = self._registered.pop(owner, None)
            for handle in known.handles if known is not None else ():
                self._nixl.deregister_memory(handle)

    def metadata(self) -> bytes:
        """Return what another agent needs to read the registered memory."""
        described: bytes = self._nixl.get_agent_metadata()
        return described

    def connect(self, source: int, name: str, metadata: bytes) -> None:
        """Make the memory of a source rank readable."""
        if self._peers.get(source) == (name, metadata):
            return
        self.disconnect(source)
        try:
            self._nixl.add_remote_agent(metadata)
        except Exception as error:
            raise Lost(f"{type(error).__name__}: {error}") from error
        self._peers[source] = name, metadata

    def disconnect(self, source: int) -> None:
        """Forget a source rank, also one that is dead."""
        name, _ = self._peers.pop(source, ("", b""))
        # A late transfer needs its connection.
        if name and not any(agent is self for agent, _ in late_reads()):
            self._nixl.remove_remote_agent(name)

    def prepare(self, source: int, moves: Sequence[tuple[Run, Run, tuple[int, ...], int]]) -> list[Any]:
        """Return the transfers from a source rank: from where, to where, the sizes, and the bytes of an element."""
        numpy = importlib.import_module("numpy")
        by_kind: dict[tuple[str, str], list[Any]] = {}
        for move, (origin, target, sizes, itemsize) in enumerate(moves):
            length, dims = collapse(sizes, itemsize, origin.strides, target.strides)
            at = numpy.array([[origin.address, target.address]], numpy.int64)
            for size, one, other in dims:
                steps = numpy.arange(size, dtype=numpy.int64)[:, None] * numpy.array([[one, other]], numpy.int64)
                at = (steps[:, None, :] + at[None, :, :]).reshape(-1, 2)
            for begin in range(0, length, READ_BYTES):
                rows = numpy.empty((len(at), 6), numpy.int64)
                rows[:, :2] = at + begin
                rows[:, 2] = min(READ_BYTES, length - begin)
                rows[:, 3:] = _number(origin.device), _number(target.device), move
                by_kind.setdefault((_kind(origin.device), _kind(target.device)), []).append(rows)
        handles = []
        for kinds, parts in by_kind.items():
            rows, parcels = _merge(numpy, numpy.concatenate(parts))
            columns = rows[:, [0, 2, 3]], rows[:, [1, 2, 4]]
            theirs, ours = (numpy.ascontiguousarray(one.astype(numpy.uint64)) for one in columns)
            remote = self._nixl.prep_xfer_dlist(self._peers[source][0], theirs, kinds[0])
            local = self._nixl.prep_xfer_dlist("NIXL_INIT_AGENT", ours, kinds[1])
            for number in numpy.unique(parcels):
                chosen = numpy.flatnonzero(parcels == number).astype(numpy.int32)
                # The lists must outlive the transfers.
                handle = self._nixl.make_prepped_xfer("READ", local, chosen, remote, chosen)
                handles.append((handle, local, remote))
        return handles

    def read(self, handles: Sequence[Any], deadline: float) -> None:
        """Do transfers, which can be repeated; after Late some may still be writing."""
        running = []
        for handle, _, _ in handles:
            if time.monotonic() > deadline:
                raise Late
            if not self._is_done(handle, post=True):
                running.append(handle)
        pause = 1e-5
        while running := [handle for handle in running if not self._is_done(handle)]:
            if time.monotonic() > deadline:
                raise Late
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def _is_done(self, handle: Any, *, post: bool = False) -> bool:
        try:
            state = self._nixl.transfer(handle) if post else self._nixl.check_xfer_state(handle)
        except Exception as error:
            raise Lost(f"{type(error).__name__}: {error}") from error
        if state == "ERR":
            raise Lost("NIXL says that the transfer has failed")
        return bool(state == "DONE")

    def release(self, handles: Sequence[Any], owner: Any) -> None:
        """Give back transfers that have ended, and then the memory that their owner has registered.

        NIXL may abort the process if a transfer outlives its memory or its connection.
        """
        transfers = [(self._nixl.release_xfer_handle, handle) for handle, _, _ in handles]
        lists = {id(one): one for _, *both in handles for one in both}.values()
        for release, one in (*transfers, *((self._nixl.release_dlist_handle, one) for one in lists)):
            try:
                release(one)
            except Exception as error:  # noqa: BLE001  NIXL tries again when the agent ends
                logger.debug("NIXL did not release a transfer: %s", error)
        self.deregister(owner)

    def is_writing(self, handles: Sequence[Any]) -> bool:
        """Return whether one of the transfers may still write."""
        return any(self._state(handle) == "PROC" for handle, _, _ in handles)

    def _state(self, handle: Any) -> str:
        try:
            return str(self._nixl.check_xfer_state(handle))
        except Exception as error:  # noqa: BLE001  a transfer that has failed does not write, nor one that never began
            return type(error).__name__

    def close(self) -> None:
        """Give back all memory and all connections."""
        for owner in list(self._registered):
            self.deregister(owner)
        for source in list(self._peers):
            self.disconnect(source)
        self._stop()
        atexit.unregister(self._stop)


def _merge(numpy: Any, rows: Any) -> tuple[Any, Any]:
    """Join reads of one move that touch on both sides; return the reads, and the number of the transfer of each.

    Memory of two moves may touch too, but belong to two registered regions, and NIXL refuses a read that crosses both.
    """
    follows = (rows[1:, :2] == rows[:-1, :2] + rows[:-1, 2:3]).all(axis=1) & (rows[1:, 3:] == rows[:-1, 3:]).all(axis=1)
    parcels = (numpy.cumsum(rows[:, 2]) - rows[:, 2]) // READ_BYTES
    starts = numpy.flatnonzero(numpy.concatenate([[True], ~follows | (parcels[1:] != parcels[:-1])]))
    merged = rows[starts]
    merged[:, 2] = numpy.add.reduceat(rows[:, 2], starts)
    return merged, parcels[starts]


def _kind(device: str) -> str:
    return "DRAM" if device == "cpu" else "VRAM"


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def late_reads() -> list[tuple[Agent, Any]]:
    """Return what late transfers of this process may still write, also those of links that were closed."""
    late: list[tuple[Agent, Any]] = find_shared("late", [])
    return late


def late_lock() -> threading.Lock:
    """Return the lock that is held while late transfers are given back, so that each is given back once."""
    lock: threading.Lock = find_shared("late_lock", threading.Lock())
    return lock
