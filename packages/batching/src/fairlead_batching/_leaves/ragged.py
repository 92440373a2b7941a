# SPDX-License-Identifier: Apache-2.0
"""Rows of different shapes in one buffer."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Self

import numpy as np

from . import interop, transport
from .interop import IntArray


class RaggedLeaf:
    """A leaf whose rows have different shapes, such as image patches or audio: one buffer, cut by offsets.

    A row that occurs several times is stored once, and stays shared when the batch is sharded, reordered, repeated,
    joined or pickled. Rows are views of the buffer. They cannot be written if they are arrays; do not write to them if
    they are tensors, because other samples may share them.

    - rows: the segment of each row; rows that are shared have the same one;
    - shapes: the shape of each segment;
    - buffer: the values of all segments, one after the other;
    - offsets: where each segment starts in the buffer, and where the last one ends.

    Args:
        rows: arrays, or tensors on one device, of one dtype and one number of dims. A row that is the same object as
            another one shares its memory.

    Raises:
        TypeError: a row is not an array or a tensor, or is not of the kind of row 0.
        ValueError: a row differs from row 0 in its dtype, device or number of dims.

    >>> image = np.ones((3, 4))
    >>> leaf = RaggedLeaf([image, np.zeros((2, 4)), image])
    >>> len(leaf), leaf[2].shape, leaf.nbytes == (3 * 4 + 2 * 4) * 8
    (3, (3, 4), True)
    >>> BatchedDataDict(patches=leaf).repeat_interleave(2)["patches"].nbytes == leaf.nbytes
    True
    """

    def __init__(self, rows: Iterable[Any]) -> None:
        given = list(rows)
        distinct = {id(row): row for row in given}
        segments = list(distinct.values())
        places = {identity: place for place, identity in enumerate(distinct)}
        for number, row in enumerate(given):
            _check_row(number, row, given[0])
        shapes = np.array([tuple(segment.shape) for segment in segments], dtype=np.int64)
        flat = [segment.reshape(-1) for segment in segments]
        buffer = _concatenate(flat) if flat else np.zeros(0)
        segment_of = np.array([places[id(row)] for row in given], dtype=np.int64)
        self.__setstate__((buffer, shapes.reshape(len(segments), given[0].ndim if given else 0), segment_of))

    def __setstate__(self, state: tuple[Any, IntArray, IntArray]) -> None:
        buffer, shapes, rows = state
        if isinstance(buffer, np.ndarray):
            buffer.flags.writeable = False
        self.buffer: Any = buffer
        self.shapes: IntArray = shapes
        self.rows: IntArray = rows
        self.offsets: IntArray = np.append(0, np.cumsum(self.shapes.prod(axis=1))).astype(np.int64)

    @classmethod
    def _make(cls, buffer: Any, shapes: IntArray, rows: IntArray) -> Self:
        new = cls.__new__(cls)
        new.__setstate__((buffer, shapes, rows))
        return new

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        """Return one row, as a view."""
        segment = self.rows[index]
        return self.buffer[self.offsets[segment] : self.offsets[segment + 1]].reshape(self.shapes[segment].tolist())

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"RaggedLeaf({len(self)} rows, {self.nbytes:,} bytes, {self.dtype})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedLeaf):
            return NotImplemented
        return len(self) == len(other) and all(map(interop.is_same, self, other))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._pack_leaf("rows", views=False).__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.compact(copy=True)  # as for a batch, also on other devices

    def _pack_leaf(self, key: Any, views: bool) -> transport.Sent:
        """Return the object that is pickled in place of this leaf; `transport.pack` calls it with the promise."""
        compact = self.compact()
        buffer = transport.pack({key: compact.buffer}, views)[key]
        return transport.Sent(self._make, buffer, compact.shapes, compact.rows)

    @property
    def dtype(self) -> Any:
        """The dtype of all rows."""
        return self.buffer.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, each counted once however often it occurs."""
        used = np.unique(self.rows)
        return int((self.offsets[used + 1] - self.offsets[used]).sum()) * int(self.buffer.itemsize)

    def take(self, indices: IntArray, /) -> Self:
        """Return the rows at ``indices``. They share this leaf's buffer."""
        return self._make(self.buffer, self.shapes, self.rows[indices])

    @classmethod
    def concat(cls, leaves: Sequence[Self], /) -> Self:
        """Return all rows of all leaves. Parts of one leaf still share its rows; other buffers are copied.

        Raises:
            TypeError, ValueError: rows of two leaves are of different kinds, as in the constructor.
        """
        leaves = [leaf for leaf in leaves if len(leaf)] or list(leaves[:1])
        for leaf in leaves[1:]:
            _check_row(0, leaf[0], leaves[0][0])
        distinct = {id(leaf.buffer): leaf for leaf in leaves}  # parts of one leaf have its buffer
        owners = list(distinct.values())
        first = dict(zip(distinct, accumulate((len(owner.shapes) for owner in owners), initial=0), strict=False))
        buffer = owners[0].buffer if len(owners) == 1 else _concatenate([owner.buffer for owner in owners])
        rows = np.concatenate([leaf.rows + first[id(leaf.buffer)] for leaf in leaves])
        return cls._make(buffer, np.concatenate([owner.shapes for owner in owners]), rows)

    def to(self, device: Any, /) -> Self:
        """Return the leaf with its tensors on ``device``; arrays are not moved."""
        buffer = self.buffer.to(device) if interop.is_tensor(self.buffer) else self.buffer
        return self._make(buffer, self.shapes, self.rows)

    def compact(self, *, copy: bool = False) -> Self:
        """Return a leaf whose buffer holds only the rows that occur in it: itself if it does, unless ``copy``."""
        used, rows = np.unique(self.rows, return_inverse=True)
        if len(used) == len(self.shapes) and not copy:
            return self
        flat = [self.buffer[:0], *(self.buffer[self.offsets[number] : self.offsets[number + 1]] for number in used)]
        return self._make(_concatenate(flat), self.shapes[used], rows.reshape(-1))

    def to_padded(self, value: Any = 0) -> Any:
        """Return all rows as one array or tensor (rows, ...), padded with ``value`` at the end of each dim.

        >>> RaggedLeaf([np.array([1, 2]), np.array([3])]).to_padded().tolist()
        [[1, 2], [3, 0]]
        """
        shape = [len(self), *(self.shapes[self.rows].max(axis=0).tolist() if len(self) else [])]
        padded = interop.full(shape, value, self.dtype, self.buffer)
        for number, row in enumerate(self):
            padded[(number, *map(slice, row.shape))] = row
        return padded


def _check_row(number: int, row: Any, first: Any) -> None:
    if not isinstance(row, np.ndarray) and not interop.is_tensor(row):
        raise TypeError(f"Row {number} must be an array or a tensor, found {type(row).__name__}: convert it first.")
    if isinstance(row, np.ndarray) != isinstance(first, np.ndarray):
        raise TypeError(
            f"Rows must be all arrays or all tensors: row {number} is a {type(row).__name__}, others are not."
        )
    for what, value, expected in (
        ("dtype", row.dtype, first.dtype),
        ("dims", row.ndim, first.ndim),
        ("device", str(getattr(row, "device", "")), str(getattr(first, "device", ""))),
    ):
        if value != expected:
            raise ValueError(f"Rows must agree: row {number} has {what} {value}, the first row {expected}. Convert it.")


def _concatenate(flat: Sequence[Any]) -> Any:
    return np.concatenate(flat) if isinstance(flat[0], np.ndarray) else interop.require_torch().cat(list(flat))
