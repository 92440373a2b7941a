# SPDX-License-Identifier: Apache-2.0
"""Ranks on a grid of named axes: the value, and what can be looked up in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np

from ._axes import as_coords, as_int, as_names, find, find_all
from ._layout import IntArray, as_layout, is_counting
from ._reshape import select


class Grid:
    """`NamedSharding` as far as it only answers questions; see there."""

    _layout: IntArray
    _names: tuple[str, ...]

    def __init__(self, layout: object, names: Sequence[str]) -> None:
        ranks, checked = as_layout(layout), as_names(names)
        if ranks.ndim != len(checked):
            raise ValueError(
                f"Number of dimensions in layout ({ranks.ndim}) must match the number of names "
                f"({len(checked)}): {list(checked)}."
            )
        self.__dict__.update(_layout=ranks, _names=checked)

    @property
    def names(self) -> list[str]:
        """The axis names, outermost first."""
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis, outermost first."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._layout.size

    @property
    def layout(self) -> IntArray:
        """A copy of the ranks, an int64 array with one dimension per axis."""
        return self._layout.copy()

    def get_axis_index(self, name: str) -> int:
        """Which dimension of the layout the axis is."""
        return find(self._names, name)

    def get_axis_size(self, name: str) -> int:
        """The number of coordinates along the axis."""
        return int(self._layout.shape[find(self._names, name)])

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return the coordinate of a rank along every axis; takes as long with a million ranks as with two.

        >>> NamedSharding.from_shape(dp=2, tp=4).get_worker_coords(6)
        {'dp': 1, 'tp': 2}
        """
        position = self._position(worker_id)
        return {name: position // stride % size for name, stride, size in self._steps}

    def get_ranks_by_coord(self, /, **coords: int) -> list[int]:
        """The ranks at these coordinates, ascending.

        Axes not named match all. A coordinate outside its axis, so also a negative one, matches nothing.

        >>> sharding = NamedSharding.from_shape(dp=2, tp=4)
        >>> sharding.get_ranks_by_coord(tp=1), sharding.get_ranks_by_coord(tp=9)
        ([1, 5], [])
        """
        at = as_coords(self._names, coords)
        if any(not 0 <= coordinate < self._layout.shape[dim] for dim, coordinate in at.items()):
            return []
        matching, _ = select(self._layout, self._names, coords)
        ranks: list[int] = np.sort(matching, axis=None).tolist()
        return ranks

    def groups(self, /, *axes: str) -> list[list[int]]:
        """The communicator groups along ``axes``, as `torch.distributed.new_group` wants them.

        The ranks of a group differ only along ``axes`` and are row-major in the order given; the groups are
        row-major over the other axes. With no axes, each rank is a group of its own.

        >>> sharding = NamedSharding.from_shape(dp=2, tp=4)
        >>> sharding.groups("tp"), sharding.groups("dp")
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])
        """
        along = find_all(self._names, axes)
        others = [dim for dim in range(self.ndim) if dim not in along]
        length = math.prod(self._layout.shape[dim] for dim in along)
        groups: list[list[int]] = self._layout.transpose(*others, *along).reshape(-1, length).tolist()
        return groups

    def peers(self, rank: int, /, *axes: str) -> list[int]:
        """That one of ``groups(*axes)`` in which ``rank`` is.

        >>> NamedSharding.from_shape(dp=2, tp=4).peers(6, "tp")
        [4, 5, 6, 7]
        """
        find_all(self._names, axes)
        fixed = {axis: at for axis, at in self.get_worker_coords(rank).items() if axis not in axes}
        ranks, names = select(self._layout, self._names, fixed)
        peers: list[int] = ranks.transpose([names.index(axis) for axis in axes]).ravel().tolist()
        return peers

    def neighbor(self, rank: int, axis: str, offset: int = 1, wrap: bool = True) -> int | None:
        """The rank ``offset`` coordinates further along ``axis``, round the end or (without ``wrap``) None.

        >>> sharding = NamedSharding.from_shape(pp=3, tp=2)
        >>> sharding.neighbor(0, "pp"), sharding.neighbor(0, "pp", -1), sharding.neighbor(4, "pp", wrap=False)
        (2, 4, None)
        """
        size = self.get_axis_size(axis)
        coords = self.get_worker_coords(rank)
        target = coords[axis] + as_int(offset, "The offset")
        if not wrap and not 0 <= target < size:
            return None
        coords[axis] = target % size
        return int(self._layout[tuple(coords.values())])

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"A {type(self).__name__} is immutable: {name!r} cannot be set or deleted.")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        return self is other or (self._names == other._names and np.array_equal(self._layout, other._layout))

    def __hash__(self) -> int:
        return self._hash

    # Worked out when first needed: a cached_property writes past __setattr__, and is not pickled.

    @cached_property
    def _start(self) -> int | None:
        """The first rank, if the others count up from it."""
        return int(self._layout.flat[0]) if is_counting(self._layout) else None

    @cached_property
    def _positions(self) -> dict[int, int]:
        """Where in layout order each rank is; needed only when ranks do not count up."""
        return {rank: position for position, rank in enumerate(self._layout.ravel().tolist())}

    @cached_property
    def _steps(self) -> list[tuple[str, int, int]]:
        """For each axis: its name, how many positions apart its coordinates are, and its size."""
        shape = self._layout.shape
        return [(name, math.prod(shape[dim + 1 :]), shape[dim]) for dim, name in enumerate(self._names)]

    @cached_property
    def _hash(self) -> int:
        ranks = self._layout.tobytes() if self._start is None else self._start
        return hash((self._names, self._layout.shape, ranks))

    def _position(self, rank: object) -> int:
        try:
            wanted = as_int(rank, "A rank")
            if self._start is None:
                return self._positions[wanted]
            if 0 <= wanted - self._start < self.size:
                return wanted - self._start
        except (ValueError, KeyError):
            pass
        raise ValueError(f"Worker ID {rank} not found in sharding layout.")
