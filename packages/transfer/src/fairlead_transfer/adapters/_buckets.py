# SPDX-License-Identifier: Apache-2.0
"""A stream of named tensors as buckets of bytes: which bytes of which tensor lie where, and who holds them.

A bucket is cut into stripes, which the senders hold in turn. So each sender holds the same share of every bucket,
whatever the sizes of the tensors, and only the bytes that are filled travel.
"""

import importlib
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

STRIPE = 1 << 20
# Every tensor begins where any dtype may begin.
ALIGNED = 64


class Part(NamedTuple):
    """A part of a tensor in a bucket; a tensor that is larger than a bucket has several."""

    name: str  # the tensor
    dtype: str  # its dtype
    shape: tuple[int, ...]  # its shape
    begin: int  # where the part begins in the tensor, in bytes
    length: int  # of the part, in bytes
    place: int  # where the part begins in the bucket


@dataclass(frozen=True)
class BucketShape:
    """The shape of all buckets of a stream."""

    senders: int  # their number
    stripe: int  # bytes that follow each other in one sender
    rows: int  # stripes of each sender in a full bucket

    @classmethod
    def fit(cls, bucket_bytes: int, senders: int) -> "BucketShape":
        """Return the largest shape that fits; ValueError if there is none."""
        share = bucket_bytes // senders // ALIGNED * ALIGNED
        stripe = share if senders == 1 else min(STRIPE, share)
        if stripe < ALIGNED:
            text = f"A bucket of {bucket_bytes} bytes is too small for {senders} senders"
            raise ValueError(f"{text}: give at least {ALIGNED * senders} bytes.")
        return cls(senders, stripe, bucket_bytes // (senders * stripe))

    @property
    def capacity(self) -> int:
        """The bytes of a full bucket."""
        return self.senders * self.stripe * self.rows

    @property
    def share(self) -> int:
        """The bytes of a full bucket that one sender holds."""
        return self.stripe * self.rows

    def find_stripes(self, sender: int, filled: int) -> list[tuple[int, int]]:
        """Return where the stripes of a sender begin in a bucket with so many bytes, and their lengths."""
        places = range(sender * self.stripe, filled, self.senders * self.stripe)
        return [(place, min(self.stripe, filled - place)) for place in places]


class Packer:
    """Fills the share of one sender, bucket after bucket, from tensors that all senders have.

    Floating-point tensors travel in the dtype, or in their own.
    """

    def __init__(self, shape: BucketShape, sender: int, dtype: str | None = None) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._shape = shape
        self._sender = sender
        self._dtype = None if dtype is None else getattr(self._torch, dtype)
        self._bytes: Any = None
        self.parts: list[Part] = []
        self._filled = 0

    def begin(self, memory: memoryview) -> None:
        """Fill this memory from now on, which is for a share."""
        self._bytes = self._torch.frombuffer(memory, dtype=self._torch.uint8)

    def forget(self) -> None:
        """Refer to no memory any more: an error of the caller would keep it."""
        self._bytes = None

    def add(self, name: str, tensor: Any) -> Iterator[None]:
        """Add a tensor; yield whenever a bucket is full, which must have been taken before the next step."""
        torch = self._torch
        is_whole = isinstance(tensor, torch.Tensor) and not hasattr(tensor, "placements")
        # The process would die of a quantized tensor, whose bytes torch cannot copy.
        if not is_whole or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"{name!r} is a {type(tensor).__qualname__}: yield whole, dense torch tensors.")
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.detach().to(self._dtype)
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        length, capacity, begin = content.numel(), self._shape.capacity, 0
        # Tensors that fit in a bucket stay in one piece: receivers can use them where they are.
        if self.parts and self._filled + length > capacity and length <= capacity:
            yield
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        while True:
            size = min(length - begin, capacity - self._filled)
            if size or not length:
                self.parts.append(Part(name, dtype, shape, begin, size, self._filled))
                self._put(content[begin : begin + size])
                self._filled = min(capacity, -(-(self._filled + size) // ALIGNED) * ALIGNED)
                begin += size
            if begin == length:
                return
            yield

    def _put(self, content: Any) -> None:
        """Copy the bytes that fall on this sender."""
        stripe, senders, done = self._shape.stripe, self._shape.senders, 0
        while done < len(content):
            number, inside = divmod(self._filled + done, stripe)
            row, owner = divmod(number, senders)
            size = min(stripe - inside, len(content) - done)
            if owner == self._sender:
                begin = row * stripe + inside
                self._bytes[begin : begin + size].copy_(content[done : done + size])
            done += size

    def take(self) -> tuple[list[Part], int]:
        """Return what is in the bucket and its bytes; the next tensor begins another one."""
        parts, filled = self.parts, self._filled
        self.parts, self._filled = [], 0
        return parts, filled


def _count_references(memories: list[mmap.mmap]) -> list[int]:
    return [sys.getrefcount(memory) for memory in memories]


def _new_memory(length: int) -> mmap.mmap:
    """Return memory that goes back to the system at once; pages that are never written take none."""
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Unpacker:
    """Makes tensors of buckets again."""

    def __init__(self, shape: BucketShape) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._shape = shape
        self._large: Any = None
        self._memories: list[mmap.mmap] = []

    def make(self) -> mmap.mmap:
        """Return memory for a bucket, which lives as long as a tensor in it; that of an older one if it has none."""
        # Tensors in it refer to it. How many references it has without them depends on the Python.
        unused = _count_references([_new_memory(1)])[0]
        free = [index for index, count in enumerate(_count_references(self._memories)) if count == unused]
        if not free:
            self._memories = [*self._memories[-1:], _new_memory(self._shape.capacity)]
        return self._memories[free[0] if free else -1]

    def unpack(self, parts: Sequence[Part], memory: mmap.mmap) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that a bucket completes; those that fit in a bucket share its memory."""
        flat = self._torch.frombuffer(memory, dtype=self._torch.uint8)
        for part in parts:
            dtype = getattr(self._torch, part.dtype)
            content = flat[part.place : part.place + part.length]
            size = dtype.itemsize * math.prod(part.shape)
            if not size:
                yield part.name, self._torch.empty(part.shape, dtype=dtype)
            elif size == part.length:
                yield part.name, content.view(dtype).view(part.shape)
            else:
                if not part.begin:
                    self._large = self._torch.empty(part.shape, dtype=dtype)
                self._large.view(-1).view(self._torch.uint8)[part.begin : part.begin + part.length].copy_(content)
                if part.begin + part.length == size:
                    large, self._large = self._large, None
                    yield part.name, large
