# SPDX-License-Identifier: Apache-2.0
"""Memory that a source rank shares with processes of its node.

It is an anonymous file (`memfd_create`), which others open through the process's open files, so that nothing is left
behind however the process ends. It never shrinks, because a reader would die of SIGBUS; a larger one is a new file.
The token tells whether the right file was opened. A generation stands at both ends, so that a reader sees whether the
content changed while it was read.
"""

import mmap
import os
import struct
import weakref
from collections.abc import Collection
from typing import Any

from .tensors import copy_all, part, view_parts
from .transport import Blocked, Overwritten, Read, Transport, Write

NAME = "fairlead-transfer"
# Token, then the generation; the same again at the end.
MARK = "<16sQ"
HEAD = 64


class Segment:
    """The owner's side.

    Attributes:
        size: bytes of the content.
        token: what tells this segment from others.
        generation: of the content.
        file: the descriptor of its file.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.token = os.urandom(16)
        self.generation = 0
        self.file = os.memfd_create(NAME)
        self._close = weakref.finalize(self, os.close, self.file)  # also if the next line fails
        os.ftruncate(self.file, size + 2 * HEAD)
        self._page = mmap.mmap(self.file, size + 2 * HEAD)
        self._mark(0, 0)

    def _mark(self, head: int, tail: int) -> None:
        struct.pack_into(MARK, self._page, 0, self.token, head)
        struct.pack_into(MARK, self._page, HEAD + self.size, self.token, tail)

    def begin(self) -> memoryview:
        """Start to write: readers refuse the content from now on. Returns the content."""
        self.generation += 1
        # Different at both ends: whoever looks now finds no generation.
        self._mark(0, self.generation)
        return memoryview(self._page)[HEAD : HEAD + self.size]

    def end(self) -> tuple[Any, ...]:
        """Finish writing; return what a reader needs."""
        self._mark(self.generation, self.generation)
        return os.getpid(), self.file, self.size, self.token, self.generation

    def close(self) -> None:
        """Give the memory back as soon as no process maps it."""
        self._close()


class Mapping:
    """A reader's side.

    Args:
        description: what `Segment.end` returned.

    Raises:
        OSError: the segment cannot be opened from this process, or another one was found; says why.
    """

    def __init__(self, description: tuple[Any, ...]) -> None:
        pid, file, size, self.token, _ = description
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not os.readlink(f"/proc/self/fd/{opened}").startswith(f"/memfd:{NAME}"):
                raise OSError(f"process {pid} of this process's namespace is another one")
            if os.fstat(opened).st_size < size + 2 * HEAD:
                raise OSError(f"process {pid} of this process's namespace shares another segment")
            self._page = mmap.mmap(opened, size + 2 * HEAD, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self._size = size
        if self._page[:16] != self.token:
            raise OSError(f"process {pid} of this process's namespace shares another segment")

    def content(self) -> memoryview:
        """Return the content."""
        return memoryview(self._page)[HEAD : HEAD + self._size]

    def holds(self, generation: int) -> bool:
        """Return whether the content is that of a generation, and no writer is at it."""
        marks = [struct.unpack_from(MARK, self._page, at) for at in (HEAD + self._size, 0)]
        return marks == [(self.token, generation)] * 2


class SharedMemory(Transport):
    """The transport between processes of one node that can map each other's memory."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._outgoing: dict[int, tuple[Any, list[Any]]] = {}
        # By source rank and channel.
        self._mapped: dict[tuple[int, int], Mapping] = {}
        self._incoming: dict[tuple[int, int], tuple[Any, list[Any]]] = {}
        self._used: list[tuple[Mapping, int]] = []

    def stage(self, write: Write) -> Any:
        """Copy the blocks into a segment, which is kept from one send to the next."""
        tools, number, size, blocks, order, fresh = write
        segment = self._segments.get(number)
        if segment is None or segment.size != size or fresh:
            if segment is not None:
                self._discard(self._segments.pop(number))
            try:
                segment = self._segments[number] = self._make(size)
            except (AttributeError, OSError) as error:
                raise Blocked(f"it has no anonymous file (memfd_create): {type(error).__name__}: {error}") from error
            self._outgoing.pop(number, None)
        content = segment.begin()
        known, views = self._outgoing.get(number, (None, []))
        if known != order:
            # The same memory in every send, so its views are made once.
            views = [tools.view(content, block.dtype, block.offset, block.sizes) for block in blocks]
            self._outgoing[number] = order, views
        copy_all(tools, zip(views, (part(block.tensor, block.box) for block in blocks), strict=True))
        return segment.end()

    def _make(self, size: int) -> Segment:
        """Return a new segment."""
        return Segment(size)

    def _discard(self, segment: Segment) -> None:
        """Close a segment that is used no more."""
        segment.close()

    def fetch(self, read: Read) -> list[Any]:
        """Return views of the source's memory."""
        place, staged = (read.source, read.number), read.staged
        if place not in self._mapped or self._mapped[place].token != staged[3]:
            try:
                self._mapped[place] = Mapping(staged)
            except OSError as error:
                raise Blocked(f"{type(error).__name__}: {error}") from error
            self._incoming.pop(place, None)
        mapped = self._mapped[place]
        if not mapped.holds(staged[4]):
            raise Overwritten
        self._used.append((mapped, staged[4]))
        known, views = self._incoming.get(place, (None, []))
        if known != read.order:
            # The same memory in every send, so its views are made once.
            places = [(0, part.offset) for part in read.wanted]
            views = view_parts(read.tools, [mapped.content()], read.wanted, places)
            self._incoming[place] = read.order, views
        return views

    def is_unchanged(self) -> bool:
        """Return whether no segment has been written since it was opened."""
        return all(mapped.holds(generation) for mapped, generation in self._used)

    def release(self) -> None:
        """Forget what was fetched; the segments stay mapped."""
        self._used = []

    def keep_only(self, numbers: Collection[int]) -> None:
        """Close the segments of other channels."""
        for number in set(self._segments).difference(numbers):
            self._discard(self._segments.pop(number))
            self._outgoing.pop(number, None)

    def forget_others(self, places: Collection[tuple[int, int]]) -> None:
        """Unmap the segments of other channels: the memory of a process that has ended goes with the last map."""
        for place in set(self._mapped).difference(places):
            del self._mapped[place]
            self._incoming.pop(place, None)

    def close(self) -> None:
        """Give the memory back as soon as no process maps it."""
        for segment in self._segments.values():
            self._discard(segment)
