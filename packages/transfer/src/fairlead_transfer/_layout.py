# SPDX-License-Identifier: Apache-2.0
"""Which box of a tensor each rank holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fairlead_sharding import NamedSharding

Boxes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LocalTensor:
    """The box of a tensor that this rank holds, for anything that is neither replicated nor a DTensor.

    A worker whose Python lacks this package may return any object with these three attributes.

    Attributes:
        tensor: the local part, a numpy array or a torch tensor.
        global_shape: the shape of the whole tensor.
        offsets: the first index of the local part in each dim.
    """

    tensor: Any
    global_shape: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True, eq=False)
class Layout:
    """The box that each rank holds of a tensor.

    Two layouts are equal if their shapes, boxes and item sizes are equal.

    Args:
        shape: the global shape of the tensor.
        offsets: the first index of each rank's box in each dim, of shape `(ranks, dims)`.
        sizes: the lengths of the boxes, of the same shape. A rank with a length of 0 holds nothing.
        itemsize: bytes of one element.

    A scalar has the shape `()` and boxes of one dim, with offset 0 and length 1 or 0.

    Attributes:
        shape: the global shape of the tensor.
        offsets: the first index of each rank's box in each dim, as a read-only array.
        sizes: the lengths of the boxes, as a read-only array.
        itemsize: bytes of one element.

    Raises:
        TypeError, ValueError: a box that is outside the tensor, or arrays of another shape.

    >>> Layout((4, 3), offsets=[[0, 0], [2, 0]], sizes=[[2, 3], [2, 3]])
    Layout(shape=(4, 3), ranks=2, boxes=2, itemsize=1)
    """

    shape: tuple[int, ...]
    offsets: Boxes
    sizes: Boxes
    itemsize: int = 1

    def __post_init__(self) -> None:
        shape = tuple(_whole_number("shape", length) for length in self.shape)
        offsets, sizes = _as_boxes("offsets", self.offsets, shape), _as_boxes("sizes", self.sizes, shape)
        if offsets.shape != sizes.shape:
            raise ValueError(f"offsets are for {len(offsets)} ranks and sizes for {len(sizes)}: give one box per rank")
        if _whole_number("itemsize", self.itemsize) < 1:
            raise ValueError(f"itemsize must be at least 1 byte, got {self.itemsize!r}")
        outside = (offsets < 0) | (sizes < 0) | (offsets + sizes > np.array(shape or (1,)))
        if outside.any():
            rank = int(outside.any(axis=1).argmax())
            raise ValueError(
                f"the box of rank {rank}, offsets {offsets[rank].tolist()} and sizes {sizes[rank].tolist()}, is "
                f"outside of the shape {shape}"
            )
        for array in (offsets, sizes):
            array.flags.writeable = False
        # Past the refusal of a frozen dataclass to have its fields set.
        self.__dict__.update(shape=shape, offsets=offsets, sizes=sizes)

    @classmethod
    def replicated(cls, shape: Sequence[int], ranks: int, *, itemsize: int = 1) -> "Layout":
        """Return the layout of a tensor that each rank holds as a whole.

        >>> Layout.replicated((4, 3), ranks=2).sizes.tolist()
        [[4, 3], [4, 3]]
        """
        sizes = np.tile(np.array(tuple(shape) or (1,), np.int64), (ranks, 1))
        return cls(tuple(shape), np.zeros_like(sizes), sizes, itemsize)

    @classmethod
    def from_sharding(
        cls,
        shape: Sequence[int],
        sharding: NamedSharding,
        dims: Mapping[int, str | Sequence[str]],
        *,
        itemsize: int = 1,
    ) -> "Layout":
        """Return the layout of a tensor that is split along axes of a mesh of ranks.

        Chunks have the size that `torch.chunk` gives them: all the same, rounded up, and the last ones smaller.

        Args:
            shape: the global shape.
            sharding: the ranks 0 to n - 1 on named axes.
            dims: by dim of the tensor, the axes that split it, outermost first. FSDP2 on top of tensor parallelism is
                `("tp", "dp")`. Ranks along other axes hold replicas.
            itemsize: bytes of one element.

        Raises:
            ValueError: an axis or a dim that does not exist, an axis that splits two dims, or other ranks than
                0 to n - 1.

        >>> mesh = NamedSharding.from_shape(dp=2, tp=2)
        >>> Layout.from_sharding((4, 6), mesh, {0: "dp", 1: "tp"}).offsets.tolist()
        [[0, 0], [0, 3], [2, 0], [2, 3]]
        """
        by_dim = {dim: (axes,) if isinstance(axes, str) else tuple(axes) for dim, axes in dims.items()}
        used = [axis for axes in by_dim.values() for axis in axes]
        if len(set(used)) != len(used):
            raise ValueError(f"an axis can split one dim only, got {dict(dims)!r}")
        if wrong := [dim for dim in by_dim if not 0 <= dim < len(shape)]:
            raise ValueError(f"dims {wrong} do not exist: the shape {tuple(shape)} has {len(shape)} dims")
        ranks = np.asarray(sharding.layout).ravel()
        if not np.array_equal(np.sort(ranks), np.arange(ranks.size)):
            raise ValueError(f"a layout needs the ranks 0 to {ranks.size - 1}, got {sharding!r}")
        coords = np.indices(sharding.layout.shape).reshape(sharding.ndim, -1)[:, np.argsort(ranks)]
        sizes = np.tile(np.array(tuple(shape) or (1,), np.int64), (ranks.size, 1))
        offsets = np.zeros_like(sizes)
        for dim, axes in by_dim.items():
            for axis in axes:
                coord, length = coords[sharding.get_axis_index(axis)], sizes[:, dim]
                chunk = -(-length // sharding.get_axis_size(axis))
                begin = np.minimum(coord * chunk, length)
                offsets[:, dim] += begin
                sizes[:, dim] = np.minimum(begin + chunk, length) - begin
        return cls(tuple(shape), offsets, sizes, itemsize)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.offsets)

    @cached_property
    def volumes(self) -> npt.NDArray[np.int64]:
        """The number of elements that each rank holds."""
        volumes: npt.NDArray[np.int64] = self.sizes.prod(axis=1, dtype=np.int64)
        return volumes

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        return self.shape, self.itemsize, self.offsets.tobytes(), self.sizes.tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __repr__(self) -> str:
        held = int((self.volumes > 0).sum())
        return f"Layout(shape={self.shape}, ranks={self.ranks}, boxes={held}, itemsize={self.itemsize})"


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must consist of whole numbers, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return int(value)


def _as_boxes(name: str, values: Any, shape: tuple[int, ...]) -> Boxes:
    array = np.array(values)
    dims = len(shape) or 1
    if array.ndim != 2 or array.shape[1] != dims or not len(array):
        raise ValueError(f"{name} must have the shape (ranks, {dims}), got {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers, got an array of {array.dtype}")
    return array.astype(np.int64)
