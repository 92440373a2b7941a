# SPDX-License-Identifier: Apache-2.0
"""Ray's object store as a transport: it works between any two processes of a cluster."""

import pickle
from collections.abc import Collection
from typing import Any

import ray

from .tensors import nbytes, part, view_parts
from .transport import Read, Transport, Write, fetch_stored

# Blocks from this size on are stored from where they are, the others are packed together first.
ALONE_BYTES = 1 << 20
ALIGNED = 64


class ObjectStore(Transport):
    """The transport that stores one value for each channel; Ray brings it to each node once.

    The value never changes, is kept by the views of it, and goes with the last reference.
    """

    def __init__(self) -> None:
        self._packed: dict[int, bytearray] = {}

    def stage(self, write: Write) -> Any:
        """Store one value: where each block is, and the buffers."""
        buffers: list[Any] = [None]
        tools, number = write.tools, write.number
        index: list[tuple[int, int]] = []
        small = []
        end = 0
        for tensor, box, dtype, sizes, _ in write.blocks:
            length, value = nbytes(tools, sizes, dtype), part(tensor, box)
            alone = tools.as_buffer(value) if length >= ALONE_BYTES and tools.dtype_name(value) == dtype else None
            if alone is not None:
                index.append((len(buffers), 0))
                buffers.append(pickle.PickleBuffer(alone))
                continue
            index.append((0, end))
            small.append((value, dtype, sizes, end))
            end += -(-length // ALIGNED) * ALIGNED
        if len(packed := self._packed.get(number, bytearray())) != end:
            packed = self._packed[number] = bytearray(end)
        for value, dtype, sizes, offset in small:
            tools.copy(tools.view(packed, dtype, offset, sizes), value)
        buffers[0] = pickle.PickleBuffer(memoryview(packed)[:end])
        return ray.put([index, *buffers])

    def fetch(self, read: Read) -> list[Any]:
        """Return views of the value in the object store of this node."""
        index, *buffers = fetch_stored(read.staged, read.deadline)
        return view_parts(read.tools, buffers, read.wanted, [index[part.block] for part in read.wanted])

    def keep_only(self, numbers: Collection[int]) -> None:
        """Give back the memory in which blocks of other channels were packed."""
        for number in set(self._packed).difference(numbers):
            del self._packed[number]
