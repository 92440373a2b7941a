# SPDX-License-Identifier: Apache-2.0
"""NIXL as a transport: a target reads straight from the memory of a source."""

import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from .agent import Agent, collapse, dense, late_lock, late_reads
from .tensors import Run, copy_all, find_gathered, finish, is_gathered, nbytes, part, view_parts
from .transport import Block, Blocked, Lost, Read, Transport, Wanted, Write

# Memory in shorter runs is packed before it is read. A read of 4 KiB takes about as long as one of 32 KiB.
RUN_BYTES = 32 << 10
ALIGNED = 64
# The errors of NIXL for memory that it cannot read, though its process lives.
REFUSALS = "nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError", "nixlNotSupportedError"
# Seconds between two looks for late transfers of a link that was closed.
CLOSE_S = 0.1


class Inbox(NamedTuple):
    """The reads of a target rank from a source rank, kept from one send to the next."""

    key: Any  # what it was made for
    owner: str  # of the registered memory
    is_in_place: bool  # whether bytes go straight into tensors of the target
    handles: list[Any]  # the transfers
    views: list[Any]  # the parts


class Outbox(NamedTuple):
    """The memory that a source rank lets others read, kept from one send to the next."""

    key: Any  # what it was made for
    runs: list[Run]  # where each block is
    packed: list[int]  # the numbers of the blocks that are copied first
    views: list[Any]  # where they are copied to
    kind: Any = None  # what their memory was made for
    buffer: Any = None  # that memory


class Nixl(Transport):
    """The transport by one-sided reads. The agent is made when it is used first."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._outbox = Outbox(None, [], [], [])
        self._described: dict[str, tuple[int, list[Run]]] = {}
        self._inboxes: dict[int, Inbox] = {}
        # By their ids: the tensors that late transfers of other processes may still read.
        self._read: dict[int, Any] = {}

    def _get_agent(self) -> Agent:
        if self._agent is None:
            self._agent = Agent()
        return self._agent

    def stage(self, write: Write) -> dict[str, Any]:
        """Register the tensors, and describe where the blocks are; pack strided, small, cast and gathered ones."""
        agent, (tools, _, _, blocks, order, fresh) = self._get_agent(), write
        agent.serve(busy=True)
        if fresh:
            self.keep_read(late=True)
        tensors, gathered = {id(block.tensor): block.tensor for block in blocks}, find_gathered()
        freed = {at for at, tensor in tensors.items() if is_gathered(tensor, gathered)}
        key = order, [(*tools.memory(one), tools.dtype_name(one), at in freed) for at, one in tensors.items()]
        # These may be other objects than before, with the same memory.
        packed = set(self._outbox.packed)
        read = [block.tensor for at, block in enumerate(blocks) if at not in packed]
        if self._outbox.key != key or not agent.hold("tensors", read):
            self._outbox = self._make_outbox(agent, tools, blocks, key, freed)
        kept = self._outbox
        copy_all(tools, zip(kept.views, (part(blocks[at].tensor, blocks[at].box) for at in kept.packed), strict=True))
        finish(kept.views)
        return self._describe(agent, "tensors", kept.runs)

    def _make_outbox(
        self, agent: Agent, tools: Any, blocks: Sequence[Block], key: Any, freed: Collection[int]
    ) -> Outbox:
        """Register the tensors that are read where they are, and memory for blocks of others, such as those `freed`."""
        found = [None if id(block.tensor) in freed else _find_run(tools, block) for block in blocks]
        packed = [at for at, run in enumerate(found) if run is None]
        agent.register("tensors", tools, [block.tensor for block, run in zip(blocks, found, strict=True) if run])
        if not packed:
            agent.deregister("packed")
            return Outbox(key, [run for run in found if run], packed, [])
        small = [blocks[at] for at in packed]
        offsets, size = _line_up(tools, small)
        kind = tools.name, size, tools.memory(small[0].tensor).device
        buffer = self._outbox.buffer if self._outbox.kind == kind else tools.buffer(*kind[1:])
        agent.register("packed", tools, [buffer])
        device, base, _ = tools.memory(buffer)
        views = [
            tools.view(buffer, block.dtype, offset, block.sizes) for block, offset in zip(small, offsets, strict=True)
        ]
        copies = iter(
            Run(device, base + offset, dense(block.sizes, nbytes(tools, (1,), block.dtype)))
            for block, offset in zip(small, offsets, strict=True)
        )
        runs = [next(copies) if run is None else run for run in found]
        return Outbox(key, runs, packed, views, kind, buffer)

    def relay(self, tools: Any, views: Sequence[Any]) -> dict[str, Any]:
        """Describe what has been fetched, so that other ranks of this node read it here."""
        agent = self._get_agent()
        agent.serve(busy=True)
        return self._describe(agent, "relayed", list(map(tools.memory, views)))

    def _describe(self, agent: Agent, what: str, runs: list[Run]) -> dict[str, Any]:
        number, known = self._described.get(what, (0, []))
        if runs != known:
            number += 1
            self._described[what] = number, runs
        return {
            "agent": agent.name,
            "metadata": agent.metadata(),
            "number": number,
            "runs": [tuple(run) for run in runs],
        }

    def fetch(self, read: Read) -> list[Any]:
        """Read the wanted blocks into memory of this process, or straight into tensors."""
        agent, source, staged, into = self._get_agent(), read.source, read.staged, read.into
        _release_ended()
        places = list(map(read.tools.memory, into or ()))
        key = staged["agent"], staged["metadata"], staged["number"], read.order, places
        # No other thread uses it while this one reads, and none ever does if the reads do not end.
        inbox = self._inboxes.pop(source, None)
        if inbox is None or inbox.key != key:
            if inbox is not None:
                agent.release(inbox.handles, inbox.owner)
            agent.connect(source, staged["agent"], staged["metadata"])
            inbox = _make_inbox(agent, read, key)
        try:
            finish(inbox.views)
            agent.read(inbox.handles, read.deadline)
        except BaseException as error:  # whatever ends this thread's wait, transfers may go on
            if agent.is_writing(inbox.handles):
                late_reads().append((agent, inbox))
            else:
                agent.release(inbox.handles, inbox.owner)
            if isinstance(error, Lost):
                agent.disconnect(source)
            raise
        self._inboxes[source] = inbox
        if into is None:
            return inbox.views
        copy_all(read.tools, [pair for pair in zip(into, inbox.views, strict=True) if pair[0] is not pair[1]])
        return list(into)

    def keep_read(self, *, late: bool) -> None:
        """Keep the tensors and copies that are registered now, if late transfers may read them; else none.

        Over TCP, UCX answers reads out of this process's memory, and crashes it where there is none any more.
        """
        if not late:
            self._read = {}
        elif self._agent is not None:
            self._read |= {id(one): one for one in (*self._agent.held("tensors"), *self._outbox.views)}

    def release(self) -> None:
        """Look less often for the reads of others, and keep no tensor; other memory is kept for the next send."""
        if self._agent is not None:
            self._agent.serve(busy=False)
            self._agent.let_go("tensors")
            self._give_back([source for source, inbox in self._inboxes.items() if inbox.is_in_place])

    def is_writing(self) -> bool:
        """Return whether a late transfer of this end may still write."""
        return is_writing(self._agent)

    def is_torn(self) -> bool:
        """Return whether a late transfer of this end may still write into tensors of the target."""
        return self.is_writing() and any(agent is self._agent and box.is_in_place for agent, box in late_reads())

    def keep_only(self, numbers: Collection[int]) -> None:
        """Give back what was staged, if there is no channel left."""
        if self._agent is not None and not numbers:
            self._outbox = Outbox(None, [], [], [])
            for owner in ("tensors", "packed"):
                self._agent.deregister(owner)

    def forget_others(self, sources: Collection[int]) -> None:
        """Give back the memory that was read into from other source ranks."""
        self._give_back(set(self._inboxes).difference(sources))

    def _give_back(self, sources: Collection[int]) -> None:
        for source in sources:
            inbox = self._inboxes.pop(source)
            self._get_agent().release(inbox.handles, inbox.owner)

    def close(self) -> None:
        """Give all memory back; if late transfers may still write, when they have ended."""
        self.keep_read(late=True)  # UCX makes progress as the agent closes
        self._outbox = Outbox(None, [], [], [])
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for inbox in self._inboxes.values():
            agent.release(inbox.handles, inbox.owner)
        self._inboxes.clear()
        if is_writing(agent):
            threading.Thread(target=_close_later, args=(agent,), name="fairlead-transfer close", daemon=True).start()
        else:
            agent.close()


def _find_run(tools: Any, block: Block) -> Run | None:
    """Return where a block is in a tensor's memory; None if it has to be packed."""
    value = part(block.tensor, block.box)
    run: Run = tools.memory(value)
    if tools.dtype_name(value) != block.dtype or any(stride < 0 for stride in run.strides):
        return None
    itemsize = nbytes(tools, (1,), block.dtype)
    length, _ = collapse(block.sizes, itemsize, run.strides, dense(block.sizes, itemsize))
    return run if length >= RUN_BYTES else None


def _line_up(tools: Any, blocks: Iterable[Block | Wanted]) -> tuple[list[int], int]:
    """Return the offset of each block in one piece of memory, and its size."""
    offsets, end = [], 0
    for block in blocks:
        offsets.append(end)
        end += -(-nbytes(tools, block.sizes, block.dtype) // ALIGNED) * ALIGNED
    return offsets, end


def _make_inbox(agent: Agent, read: Read, key: Any) -> Inbox:
    """Return the reads of the wanted blocks.

    Raises:
        Blocked: NIXL refuses the descriptions of the memory.
        Lost: the source cannot be reached.
    """
    tools, wanted, runs, into = read.tools, read.wanted, read.staged["runs"], read.into
    owner, views, places = uuid.uuid4().hex, list[Any](into or wanted), list[Any](key[-1] or wanted)
    itemsizes = [nbytes(tools, (1,), one.dtype) for one in wanted]
    buffered = [
        at
        for at, (one, itemsize) in enumerate(zip(wanted, itemsizes, strict=True))
        if into is None or _is_scattered(Run(*runs[one.block]), places[at], one.sizes, itemsize)
    ]
    memory = [views[at] for at in set(range(len(wanted))).difference(buffered)]
    if buffered:
        chosen = [wanted[at] for at in buffered]
        offsets, size = _line_up(tools, chosen)
        buffer = tools.buffer(size, wanted[0].device)
        memory.append(buffer)
        device, base, _ = tools.memory(buffer)
        parts = view_parts(tools, [buffer], chosen, [(0, offset) for offset in offsets])
        for at, offset, value in zip(buffered, offsets, parts, strict=True):
            places[at], views[at] = Run(device, base + offset, dense(wanted[at].sizes, itemsizes[at])), value
    agent.register(owner, tools, memory)
    moves = [
        (Run(*runs[one.block]), place, one.sizes, itemsize)
        for place, one, itemsize in zip(places, wanted, itemsizes, strict=True)
    ]
    try:
        handles = agent.prepare(read.source, moves)
    except Exception as error:
        agent.deregister(owner)
        reason = f"{type(error).__name__}: {error}"
        raise (Blocked(reason) if type(error).__name__ in REFUSALS else Lost(reason)) from error
    return Inbox(key, owner, into is not None, handles, views)


def _is_scattered(origin: Run, target: Run, sizes: tuple[int, ...], itemsize: int) -> bool:
    """Return whether a block consists of many short runs, each of which would be a read of its own."""
    length, dims = collapse(sizes, itemsize, origin.strides, target.strides)
    return bool(dims) and length < RUN_BYTES


def _release_ended() -> None:
    """Let go of memory that no late transfer writes any more."""
    late = late_reads()
    with late_lock():  # so that an agent is closed only after another thread has given back what it had
        for agent, inbox in list(late):
            if not agent.is_writing(inbox.handles):
                agent.release(inbox.handles, inbox.owner)
                late.remove((agent, inbox))


def is_writing(agent: Agent | None) -> bool:
    """Return whether a late transfer of an agent may still write."""
    _release_ended()
    return any(one is agent for one, _ in late_reads())


def _close_later(agent: Agent) -> None:
    """Close an agent when its late transfers have ended: their source continues, or is dead."""
    while is_writing(agent):
        time.sleep(CLOSE_S)
    agent.close()
