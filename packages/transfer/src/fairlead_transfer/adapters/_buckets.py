# SPDX-License-Identifier: Apache-2.0
"""A stream of named tensors as buckets of bytes: which bytes of which tensor lie where, and who holds them.

A bucket is `rows` rows of one stripe for each sender, one behind the other. So each sender holds the same share of
every bucket, whatever the sizes of the tensors.
"""

import hashlib
import importlib
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._remote.tensors import resolve

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
    """The shape of all buckets of a stream.

    Attributes:
        senders: their number.
        stripe: bytes that follow each other in one sender.
        rows: stripes of each sender in a full bucket.
    """

    senders: int
    stripe: int
    rows: int

    @classmethod
    def fit(cls, bucket_bytes: int, senders: int) -> "BucketShape":
        """Return the largest shape that fits; ValueError if there is none."""
        stripe = min(STRIPE, bucket_bytes // senders // ALIGNED * ALIGNED)
        if stripe < ALIGNED:
            text = f"A bucket of {bucket_bytes} bytes is too small for {senders} senders"
            raise ValueError(f"{text}: give at least {ALIGNED * senders} bytes.")
        return cls(senders, stripe, bucket_bytes // (senders * stripe))

    @property
    def capacity(self) -> int:
        """The bytes of a full bucket."""
        return self.senders * self.stripe * self.rows

    def count_rows(self, length: int) -> int:
        """Return the rows that so many bytes travel in: all, a half, a quarter and so on, so that plans are few."""
        rows = self.rows
        while rows > 1 and (rows + 1) // 2 * self.senders * self.stripe >= length:
            rows = (rows + 1) // 2
        return rows

    def describe(self, rows: int, sender: int | None) -> tuple[Any, ...]:
        """Return the description of a bucket as a sender holds it, or as a receiver does."""
        whole = rows, self.senders, self.stripe
        if sender is None:
            return "bucket", "torch", "uint8", 1, whole, (0, 0, 0), whole
        return "bucket", "torch", "uint8", 1, whole, (0, sender, 0), (rows, 1, self.stripe)


class Share(NamedTuple):
    """The part of a bucket that a sender holds, with the attributes of a `LocalTensor`."""

    tensor: Any
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Packer:
    """Fills the share of one sender, bucket after bucket, from tensors that all senders have."""

    def __init__(self, shape: BucketShape, sender: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._shape = shape
        self._sender = sender
        length = shape.rows * shape.stripe
        self._bytes = self._torch.frombuffer(_new_memory(length), dtype=self._torch.uint8, count=length)
        self.parts: list[Part] = []
        self._filled = 0

    def add(self, name: str, tensor: Any) -> Iterator[None]:
        """Add a tensor; yield whenever a bucket is full, which must have been taken before the next step."""
        torch = self._torch
        is_whole = isinstance(tensor, torch.Tensor) and not hasattr(tensor, "placements")
        # The process would die of a quantized tensor, whose bytes torch cannot copy.
        if not is_whole or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"{name!r} is a {type(tensor).__qualname__}: yield whole, dense torch tensors.")
        content = resolve(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
        length, capacity, begin = content.numel(), self._shape.capacity, 0
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
        stripe, senders, at = self._shape.stripe, self._shape.senders, 0
        while at < len(content):
            number, inside = divmod(self._filled + at, stripe)
            row, owner = divmod(number, senders)
            size = min(stripe - inside, len(content) - at)
            if owner == self._sender:
                begin = row * stripe + inside
                self._bytes[begin : begin + size].copy_(content[at : at + size])
            at += size

    def take(self) -> tuple[list[Part], Share]:
        """Return the bucket; the share is valid until the next tensor is added."""
        rows = self._shape.count_rows(self._filled)
        share = self._bytes[: rows * self._shape.stripe].view(rows, 1, self._shape.stripe)
        parts, self.parts, self._filled = self.parts, [], 0
        return parts, Share(share, (rows, self._shape.senders, self._shape.stripe), (0, self._sender, 0))


def _count_references(memories: list[mmap.mmap]) -> list[int]:
    return [sys.getrefcount(one) for one in memories]


def _new_memory(length: int) -> mmap.mmap:
    """Return memory that goes back to the system at once; pages that are never written take none."""
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def digest(parts: Sequence[Part], last: bool) -> bytes:
    """Return a number that tells whether two senders have the same tensors in a bucket, and others after it."""
    return hashlib.sha256(repr((last, [tuple(one) for one in parts])).encode()).digest()


class Unpacker:
    """Makes tensors of buckets again."""

    def __init__(self, shape: BucketShape) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._shape = shape
        self._large: Any = None
        self._kept: list[mmap.mmap] = []

    def make(self, rows: int) -> Any:
        """Return memory for a bucket, which lives as long as a tensor in it; that of an older one if it has none."""
        # Tensors in it refer to it. How many references it has without them depends on the Python.
        unused = _count_references([_new_memory(1)])[0]
        free = [at for at, count in enumerate(_count_references(self._kept)) if count == unused]
        if not free:
            self._kept = [*self._kept[-1:], _new_memory(self._shape.capacity)]
        memory = self._kept[free[0] if free else -1]
        length = rows * self._shape.senders * self._shape.stripe
        flat = self._torch.frombuffer(memory, dtype=self._torch.uint8, count=length)
        return flat.view(rows, self._shape.senders, self._shape.stripe)

    def unpack(self, parts: Sequence[Part], bucket: Any) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that a bucket completes; those that fit in a bucket share its memory."""
        flat = bucket.view(-1)
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
