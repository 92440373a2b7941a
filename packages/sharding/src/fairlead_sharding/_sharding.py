# SPDX-License-Identifier: Apache-2.0
"""The public value: a grid of ranks with its views, its plans, and its other forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from . import _interop, _render, _reshape
from ._axes import as_axes, as_coords, as_int, as_names, find_all
from ._grid import Grid
from ._layout import IntArray, as_layout, counting
from ._plan import BoolArray, DispatchPlan, piece_index, read_only

_T = TypeVar("_T")


def _remember(function: Callable[..., _T]) -> Callable[..., _T]:
    # A program asks for the same few plans over and over; the bound is for one that makes up axes.
    return lru_cache(maxsize=16)(function)


class NamedSharding(Grid):
    """Ranks on a grid with named axes. Immutable, hashable, safe to share between threads.

    Args:
        layout: the rank ids, a nested sequence or an array with one dimension per axis.
        names: one per dimension, outermost first.

    Raises:
        ValueError: here and in every method, for input that makes no sense; the message names it.

    >>> sharding = NamedSharding([[0, 1], [2, 3]], names=["dp", "tp"])
    >>> sharding.get_worker_coords(2)
    {'dp': 1, 'tp': 0}
    """

    @classmethod
    def from_shape(cls, /, *, start: int = 0, **sizes: int) -> NamedSharding:
        """Ranks counting up from ``start``, the last axis fastest.

        For an axis named "start", use the constructor.

        >>> NamedSharding.from_shape(dp=2, tp=4, start=8).layout
        array([[ 8,  9, 10, 11],
               [12, 13, 14, 15]])
        """
        if not sizes:
            raise ValueError("A sharding needs at least one axis, such as dp=1.")
        shape = tuple(as_int(size, f"The size of axis {name!r}", 1) for name, size in sizes.items())
        return cls(counting(shape, as_int(start, "The first rank", 0)), tuple(sizes))

    @classmethod
    def _trusted(cls, layout: IntArray, names: tuple[str, ...]) -> NamedSharding:
        """From ranks and names known to be good."""
        self = cls.__new__(cls)
        self.__dict__.update(_layout=read_only(np.array(layout, order="C")), _names=names)
        return self

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: str | Iterable[str]) -> bool:
        """Whether the coordinate along each of ``axes`` is 0; an axis missing from ``coords`` counts as 0.

        >>> NamedSharding.is_axis_zero({"dp": 1, "tp": 0}, ["tp", "pp"])
        True
        """
        return all(coords.get(axis, 0) == 0 for axis in as_axes(axes))

    def at(self, /, **coords: int | slice) -> NamedSharding | int:
        """Index by name as numpy does: an integer drops the axis, a slice keeps it, -1 is the last.

        As in numpy nothing remains around a single rank: an integer for every axis gives an int.

        Raises:
            IndexError: an integer is outside its axis.
            ValueError: a slice is empty, for a sharding needs at least one rank.

        >>> sharding = NamedSharding.from_shape(dp=4, tp=2)
        >>> sharding.at(dp=-1).shape, sharding.at(dp=slice(0, None, 2)).shape, sharding.at(dp=1, tp=1)
        ({'tp': 2}, {'dp': 2, 'tp': 2}, 3)
        """
        layout, names = _reshape.select(self._layout, self._names, coords)
        return self._trusted(layout, names) if names else int(layout)

    def get_ranks(self, /, **coords: int) -> NamedSharding | int:
        """The sharding of the remaining axes at these coordinates; the rank itself when all axes are named.

        Raises:
            IndexError: a coordinate is outside its axis, which here, unlike in `at`, negative ones are.

        >>> sharding = NamedSharding.from_shape(dp=2, tp=4)
        >>> sharding.get_ranks(dp=1).layout, sharding.get_ranks(dp=1, tp=0)
        (array([4, 5, 6, 7]), 4)
        """
        for dim, coordinate in as_coords(self._names, coords).items():
            if coordinate < 0:
                raise _reshape.outside(self._names[dim], coordinate, self._layout.shape[dim])
        return self.at(**coords)

    def flatten(self, into: str, /, *axes: str) -> NamedSharding:
        """Merge ``axes`` (all of them, if none is named) into one, row-major in the order given.

        The new axis stands where the outermost of them stood.

        >>> NamedSharding.from_shape(dp=2, pp=3, tp=4).flatten("model", "pp", "tp").shape
        {'dp': 2, 'model': 12}
        """
        return self._trusted(*_reshape.flatten(self._layout, self._names, into, axes or self._names))

    def split(self, axis: str, /, **sizes: int) -> NamedSharding:
        """Put several axes in the place of one, row-major; one size may be -1, which means what remains.

        >>> NamedSharding.from_shape(dp=6, tp=4).split("dp", replica=-1, fsdp=3).shape
        {'replica': 2, 'fsdp': 3, 'tp': 4}
        """
        return self._trusted(*_reshape.split(self._layout, self._names, axis, sizes))

    def rename(self, /, **old_to_new: str) -> NamedSharding:
        """Give axes other names, all at once: two may swap theirs.

        >>> NamedSharding.from_shape(dp=2, tp=4).rename(dp="data").names
        ['data', 'tp']
        """
        find_all(self._names, old_to_new)
        return self._trusted(self._layout, as_names([old_to_new.get(name, name) for name in self._names]))

    def transpose(self, /, *names: str) -> NamedSharding:
        """The axes in another order; each must be named once.

        >>> NamedSharding.from_shape(dp=2, tp=4).transpose("tp", "dp").shape
        {'tp': 4, 'dp': 2}
        """
        dims = find_all(self._names, names)
        if len(dims) != self.ndim:
            raise ValueError(f"transpose() needs every axis of {self.names} once, got {list(names)}.")
        return self._trusted(self._layout.transpose(dims), names)

    def piece_index(self, /, *axes: str) -> IntArray:
        """For every rank in layout order: the row-major index of its coordinate along ``axes`` (read-only).

        >>> NamedSharding.from_shape(dp=2, tp=2).piece_index("tp", "dp")
        array([0, 2, 1, 3])
        """
        return self._piece_index(find_all(self._names, axes))

    def leaders(self, /, *axes: str) -> BoolArray:
        """For every rank in layout order: whether its coordinate is 0 along all of ``axes`` (read-only).

        >>> NamedSharding.from_shape(dp=2, tp=2).leaders("tp")
        array([ True, False,  True, False])
        """
        return self._leaders(find_all(self._names, axes))

    def plan(
        self,
        in_sharded_axes: str | Iterable[str] = (),
        replicate_on_axes: str | Iterable[str] = (),
        output_is_replicated: str | Iterable[str] = (),
        make_dummy_calls_to_free_axes: bool = False,
    ) -> DispatchPlan:
        """Who is called, with which piece, and who answers. Plans are kept: asking again costs microseconds.

        Args:
            in_sharded_axes: the worker at coordinate c gets piece c; several axes index nested pieces.
            replicate_on_axes: everybody along them gets the same piece; no axis may be in both. Along the *free*
                axes, which are in neither of the two, only coordinate 0 is called.
            output_is_replicated: of the workers called, only coordinate 0 along these answers.
            make_dummy_calls_to_free_axes: call the others along free axes too, with no piece, for no answer.

        >>> plan = NamedSharding.from_shape(dp=2, tp=2).plan(in_sharded_axes=["dp"], replicate_on_axes=["tp"])
        >>> plan.called, plan.piece
        (array([0, 1, 2, 3]), array([0, 0, 1, 1]))
        """
        question = as_axes(in_sharded_axes), as_axes(replicate_on_axes), as_axes(output_is_replicated)
        for axes in question:
            find_all(self._names, axes)  # before the cache, which could not hash some of what is no name
        return self._plan(*question, bool(make_dummy_calls_to_free_axes))

    @cached_property
    def _piece_index(self) -> Callable[..., IntArray]:
        return _remember(partial(piece_index, self._layout.shape))

    @cached_property
    def _leaders(self) -> Callable[..., BoolArray]:
        return _remember(lambda dims: read_only(self._piece_index(dims) == 0))

    @cached_property
    def _plan(self) -> Callable[..., DispatchPlan]:
        return _remember(partial(DispatchPlan, self))

    def to_device_mesh(self, device_type: str) -> Any:
        """A torch ``DeviceMesh`` of "cuda", "cpu", ...; every process must make it. Without torch: ImportError."""
        return _interop.to_device_mesh(self._layout, self._names, device_type)

    @classmethod
    def from_device_mesh(cls, mesh: Any) -> NamedSharding:
        """The sharding of a torch ``DeviceMesh``; ValueError if its dimensions have no names."""
        return cls(*_interop.from_device_mesh(mesh))

    def to_jax_mesh(self, devices: Sequence[Any]) -> Any:
        """A `jax.sharding.Mesh`: rank r is ``devices[r]``; ValueError if there is none. Without jax: ImportError."""
        return _interop.to_jax_mesh(self._layout, self._names, devices)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON, which `from_dict` of any copy of this code reads.

        >>> NamedSharding.from_shape(dp=2, tp=4).to_dict()
        {'names': ['dp', 'tp'], 'shape': [2, 4], 'start': 0}
        """
        ranks = {"ranks": self._layout.ravel().tolist()} if self._start is None else {"start": self._start}
        return {"names": self.names, "shape": list(self._layout.shape), **ranks}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NamedSharding:
        """The inverse of `to_dict`; ValueError for what it did not make.

        >>> NamedSharding.from_dict({"names": ["dp"], "shape": [3], "ranks": [3, 1, 2]}).layout
        array([3, 1, 2])
        """
        try:
            shape = tuple(as_int(size, "A size in the shape", 1) for size in data["shape"])
            if "start" in data and "ranks" in data:
                raise ValueError("The dict of a sharding has start and ranks: give one of them.")
            if "start" in data:
                return cls(counting(shape, as_int(data["start"], "The first rank", 0)), data["names"])
            return cls(as_layout(data["ranks"]).reshape(shape), data["names"])
        except KeyError as missing:
            raise ValueError(f"The dict of a sharding lacks {missing}; it has {list(data)}.") from None
        except TypeError as error:
            raise ValueError(f"This is no dict of a sharding ({error}): {data!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def render(self) -> str:
        """The ranks as plain text, one grid of the last two axes for each coordinate along the others.

        >>> print(NamedSharding.from_shape(dp=2, tp=3).render())
        dp=2, tp=3 (6 ranks)
        <BLANKLINE>
              tp=0  tp=1  tp=2
        dp=0     0     1     2
        dp=1     3     4     5
        """
        return _render.render_text(self._layout, self._names)

    def _repr_html_(self) -> str:
        return _render.render_html(self._layout, self._names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self._layout.shape}, names={self.names}, layout={self._layout})"
