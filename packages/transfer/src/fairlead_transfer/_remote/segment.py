# SPDX-License-Identifier: Apache-2.0
"""Memory that a process shares with others of its node.

It is an anonymous file (`memfd_create`), which others open through the process's open files, so that nothing is left
behind however the process ends. It never shrinks, because a reader would die of SIGBUS; a larger one is a new file.
The token tells whether the right file was opened. A generation stands at both ends, so that a reader sees whether the
content changed while it was read.
"""

import mmap
import os
import struct
import threading
import weakref
from collections.abc import Collection
from typing import Any

from .replies import Unreadable

NAME = "fairlead-transfer"
# Where a segment is read, as `Segment.end` returns it.
Description = tuple[Any, ...]
# Token, then the generation; the same again at the end.
MARK = "<16sQ"
HEAD = 64
ENDED = "The transfer has ended: it was closed, or its caller has given up."


class Unread(Exception):
    """What another process, given by a key, has staged could not be read; says why."""

    def __init__(self, outcome: Unreadable, source: Any, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.source = source


class Segment:
    """The owner's side; the generation is that of its content."""

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

    def end(self) -> Description:
        """Finish writing; return what a reader needs."""
        self._mark(self.generation, self.generation)
        return os.getpid(), self.file, self.size, self.token, self.generation

    def close(self) -> None:
        """Give the memory back as soon as no process maps it."""
        self._close()


class Segments:
    """Segments by key, made when they are needed, and used again for as many bytes."""

    def __init__(self) -> None:
        self._segments: dict[Any, Segment] = {}
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, key: Any, size: int, *, fresh: bool = False) -> memoryview:
        """Return the memory of a segment, a new one if `fresh`; ValueError after `close`: a thread may still run."""
        with self._lock:
            if self._closed:
                raise ValueError(ENDED)
            segment = self._segments.get(key)
            if segment is None or segment.size != size or fresh:
                self._discard([key])
                segment = self._segments[key] = Segment(size)
            return segment.begin()

    def end(self, key: Any) -> Description:
        """Return where others find the content of a segment, which is written."""
        with self._lock:
            if self._closed:
                raise ValueError(ENDED)
            return self._segments[key].end()

    def open(self, token: bytes, generation: int, length: int) -> int | None:
        """Return a descriptor, which the caller closes, of a segment with so many bytes of a generation, or None."""
        with self._lock:
            for segment in self._segments.values():
                if segment.token == token and segment.generation == generation and length <= segment.size:
                    return os.dup(segment.file)  # the segment may be closed while its content is sent
        return None

    def keep_only(self, keys: Collection[Any]) -> None:
        """Close all other segments."""
        with self._lock:
            self._discard(set(self._segments).difference(keys))

    def _discard(self, keys: Collection[Any]) -> None:
        for segment in [self._segments.pop(key) for key in keys if key in self._segments]:
            segment.close()

    def close(self) -> None:
        """Close all segments."""
        with self._lock:
            self._closed = True
            self._discard(list(self._segments))


class Mapping:
    """A reader's side; OSError or ValueError if the segment cannot be opened from this process."""

    def __init__(self, description: Description) -> None:
        pid, file, size, self.token, _ = description
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not os.readlink(f"/proc/self/fd/{opened}").startswith(f"/memfd:{NAME}"):
                raise OSError(f"process {pid} of this process's namespace is another one")
            size = min(size, os.fstat(opened).st_size - 2 * HEAD)  # of another segment, as the token will tell
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
        marks = [struct.unpack_from(MARK, self._page, place) for place in (HEAD + self._size, 0)]
        return marks == [(self.token, generation)] * 2
