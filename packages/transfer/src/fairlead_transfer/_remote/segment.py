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
import weakref
from typing import Any

from .replies import Unreadable

NAME = "fairlead-transfer"
# Token, then the generation; the same again at the end.
MARK = "<16sQ"
HEAD = 64


class Unread(Exception):
    """What another process has staged could not be read; says why.

    Attributes:
        outcome: whether that process is late or lost, or has overwritten it.
        source: the key of that process.
    """

    def __init__(self, outcome: Unreadable, source: Any, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.source = source


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
        marks = [struct.unpack_from(MARK, self._page, place) for place in (HEAD + self._size, 0)]
        return marks == [(self.token, generation)] * 2
