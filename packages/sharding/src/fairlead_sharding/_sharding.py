# SPDX-License-Identifier: Apache-2.0
"""The two public values: `NamedSharding`, ranks on a grid of named axes, and `DispatchPlan`, which it makes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from typing import Any, NoReturn

import numpy as np

from . import _layout
from ._layout import BoolArray, IntArray, as_axes, as_coords, as_int, as_names, find_axes, find_axis, read_only

_MOST_CACHED = 16  # a bound for programs that make up new axes; most request the same few plans again and again


@dataclass(frozen=True, repr=False)
class DispatchPlan:
    """Which ranks are called, which piece each gets, and which return a result; made by `NamedSharding.plan`.

    The first five fields are the arguments of `plan`. Plans with equal arguments are equal, and only the arguments
    are pickled. Arrays are read-only and have one entry per called rank, except ``returned``:

    - sharding, in_sharded_axes, replicate_on_axes, output_is_replicated, make_dummy_calls_to_free_axes: the arguments;
    - called: the ranks to call, ascending;
    - piece: the index of the piece that each called rank gets; -1 for a dummy call;
    - answers: whether the result of the rank is collected;
    - returned: the ranks whose results are collected, ascending;
    - piece_shape: the sizes along ``in_sharded_axes``, which is how the pieces must be nested;
    - n_pieces: the number of distinct pieces; 1 when nothing is sharded.

    >>> plan = NamedSharding([[3, 1], [2, 0]], ["dp", "tp"]).plan("dp", replicate_on_axes="tp")
    >>> plan.called.tolist(), plan.piece.tolist()
    ([0, 1, 2, 3], [1, 0, 1, 0])
    """

    sharding: NamedSharding
    in_sharded_axes: tuple[str, ...] = ()
    replicate_on_axes: tuple[str, ...] = ()
    output_is_replicated: tuple[str, ...] = ()
    make_dummy_calls_to_free_axes: bool = False

    called: IntArray = field(init=False, compare=False)
    piece: IntArray = field(init=False, compare=False)
    answers: BoolArray = field(init=False, compare=False)
    returned: IntArray = field(init=False, compare=False)
    piece_shape: tuple[int, ...] = field(init=False, compare=False)
    n_pieces: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sharding, names = self.sharding, self.sharding.names
        used = {*find_axes(names, self.in_sharded_axes), *find_axes(names, self.replicate_on_axes)}
        find_axes(names, self.output_is_replicated)
        if both := [axis for axis in self.in_sharded_axes if axis in self.replicate_on_axes]:
            raise ValueError(f"Axes cannot be both sharded and replicated: {both}.")

        gets_data = sharding.leaders(*(name for dim, name in enumerate(names) if dim not in used))
        piece = np.where(gets_data, sharding.piece_index(*self.in_sharded_axes), -1)
        answers = gets_data & sharding.leaders(*self.output_is_replicated)
        ranks = sharding.layout.ravel()
        if not self.make_dummy_calls_to_free_axes:
            ranks, piece, answers = ranks[gets_data], piece[gets_data], answers[gets_data]
        if (ranks[1:] < ranks[:-1]).any():
            ascending = np.argsort(ranks)
            ranks, piece, answers = ranks[ascending], piece[ascending], answers[ascending]
        shape = tuple(sharding.get_axis_size(axis) for axis in self.in_sharded_axes)
        # A frozen dataclass refuses assignments to its fields.
        self.__dict__.update(piece_shape=shape, n_pieces=math.prod(shape), returned=read_only(ranks[answers]))
        self.__dict__.update(called=read_only(ranks), piece=read_only(piece), answers=read_only(answers))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, argument.name) for argument in fields(self) if argument.init)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._summary()}>"

    def _summary(self) -> str:
        pieces = f"{self.n_pieces} piece{'' if self.n_pieces == 1 else 's'}"
        along = f" along {list(self.in_sharded_axes)}" if self.in_sharded_axes else ""
        called = f"{len(self.called)} of {self.sharding.size} ranks called"
        return f"{called}, {pieces}{along}, {len(self.returned)} answer"

    def pieces(self, nested: Any) -> list[Any]:
        """Return the distinct pieces as a flat list that `piece` indexes, after checking their number.

        Args:
            nested: the pieces, with one level for each of `in_sharded_axes`. A level is anything that has a length
                and is indexed by position: a list, a tuple, an array or tensor along its first dim. If nothing is
                sharded, ``nested`` itself is the one piece.

        Raises:
            ValueError: a level does not have one element per coordinate of its axis.
            TypeError: a level is not such a sequence. Strings, bytes, mappings and sets never are.

        >>> plan = NamedSharding.from_shape(dp=2, tp=2).plan(in_sharded_axes=["tp", "dp"])
        >>> plan.pieces([["tp0dp0", "tp0dp1"], ["tp1dp0", "tp1dp1"]])
        ['tp0dp0', 'tp0dp1', 'tp1dp0', 'tp1dp1']
        """
        return _layout.flatten_pieces(nested, self.in_sharded_axes, self.piece_shape)

    def explain(self, max_rows: int = 40) -> str:
        """Return a table of the called ranks: their coordinates, their pieces, and whether they return a result.

        If there are more than ``max_rows`` ranks, the table shows the first and the last ones.

        >>> plan = NamedSharding.from_shape(dp=2, tp=2).plan("dp", make_dummy_calls_to_free_axes=True)
        >>> print(plan.explain())
        4 of 4 ranks called, 2 pieces along ['dp'], 2 answer
        rank  dp  tp  piece  answers
           0   0   0      0      yes
           1   0   1   None       no
           2   1   0      1      yes
           3   1   1   None       no
        """

        def row(i: int) -> list[str]:
            coords = self.sharding.get_worker_coords(self.called[i]).values()
            piece = "None" if self.piece[i] < 0 else str(self.piece[i])
            return [str(self.called[i]), *map(str, coords), piece, "yes" if self.answers[i] else "no"]

        header = ["rank", *self.sharding.names, "piece", "answers"]
        return f"{self._summary()}\n{_layout.render_table(header, row, len(self.called), max_rows)}"


class NamedSharding:
    """Ranks on a grid with named axes. Immutable, hashable, safe to share between threads.

    Args:
        layout: the rank ids, a nested sequence or an array with one dimension per axis.
        names: one per dimension, outermost first.

    Raises:
        ValueError: here and in every method, for invalid input; the message names it.

    >>> sharding = NamedSharding([[0, 1], [2, 3]], names=["dp", "tp"])
    >>> sharding.get_worker_coords(2)
    {'dp': 1, 'tp': 0}
    """

    _layout: IntArray
    _names: tuple[str, ...]

    def __init__(self, layout: object, names: Sequence[str]) -> None:
        ranks, checked = _layout.as_layout(layout), as_names(names)
        if ranks.ndim != len(checked):
            raise ValueError(
                f"Number of dimensions in layout ({ranks.ndim}) must match the number of names "
                f"({len(checked)}): {list(checked)}."
            )
        self.__dict__.update(_layout=ranks, _names=checked)

    @classmethod
    def from_shape(cls, /, *, start: int = 0, **sizes: int) -> NamedSharding:
        """Return a sharding whose ranks count up from ``start``, the last axis fastest; no axis can be named "start".

        >>> NamedSharding.from_shape(dp=2, tp=4, start=8).layout
        array([[ 8,  9, 10, 11],
               [12, 13, 14, 15]])
        """
        if not sizes:
            raise ValueError("A sharding needs at least one axis, such as dp=1.")
        shape = tuple(as_int(size, f"The size of axis {name!r}", 1) for name, size in sizes.items())
        return cls(_layout.make_layout(shape, as_int(start, "The first rank", 0)), tuple(sizes))

    @classmethod
    def _from_valid(cls, layout: IntArray, names: tuple[str, ...]) -> NamedSharding:
        """Return a sharding of ranks and names that need no check."""
        self = cls.__new__(cls)
        self.__dict__.update(_layout=read_only(np.array(layout, order="C")), _names=names)
        return self

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
        """Return the dimension of the layout that the axis is."""
        return find_axis(self._names, name)

    def get_axis_size(self, name: str) -> int:
        """Return the number of coordinates along the axis."""
        return int(self._layout.shape[find_axis(self._names, name)])

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return the coordinate of a rank along every axis; takes as long with a million ranks as with two.

        >>> NamedSharding.from_shape(dp=2, tp=4).get_worker_coords(6)
        {'dp': 1, 'tp': 2}
        """
        try:
            position = self._position(as_int(worker_id, "A rank"))
        except (ValueError, KeyError):
            raise ValueError(f"Worker ID {worker_id} not found in sharding layout.") from None
        return {name: position // stride % size for name, stride, size in self._steps}

    def get_ranks_by_coord(self, /, **coords: int) -> list[int]:
        """Return the ranks at these coordinates, ascending; none if a coordinate is outside its axis, or negative.

        >>> sharding = NamedSharding.from_shape(dp=2, tp=4)
        >>> sharding.get_ranks_by_coord(tp=1), sharding.get_ranks_by_coord(tp=9)
        ([1, 5], [])
        """
        place = as_coords(self._names, coords)
        if any(not 0 <= coordinate < self._layout.shape[dim] for dim, coordinate in place.items()):
            return []
        matching, _ = _layout.select(self._layout, self._names, coords)
        return list(np.sort(matching, axis=None).tolist())

    def get_ranks(self, /, **coords: int) -> NamedSharding | int:
        """Return the sharding of the remaining axes at these coordinates; the rank itself when all axes are named.

        Raises:
            IndexError: a coordinate is outside its axis. Unlike in `at`, negative coordinates are.

        >>> sharding = NamedSharding.from_shape(dp=2, tp=4)
        >>> sharding.get_ranks(dp=1).layout, sharding.get_ranks(dp=1, tp=0)
        (array([4, 5, 6, 7]), 4)
        """
        for dim, coordinate in as_coords(self._names, coords).items():
            if coordinate < 0:
                raise _layout.coordinate_error(self._names[dim], coordinate, self._layout.shape[dim])
        return self.at(**coords)

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: str | Iterable[str]) -> bool:
        """Return whether the coordinate along each of ``axes`` is 0; an axis missing from ``coords`` counts as 0.

        >>> NamedSharding.is_axis_zero({"dp": 1, "tp": 0}, ["tp", "pp"])
        True
        """
        return all(coords.get(axis, 0) == 0 for axis in as_axes(axes))

    def groups(self, /, *axes: str) -> list[list[int]]:
        """Return the communicator groups along ``axes``, as `torch.distributed.new_group` takes them.

        The ranks of a group differ only along ``axes`` and are row-major in the order given; the groups are
        row-major over the other axes. Without axes, each rank is a group of its own.

        >>> sharding = NamedSharding.from_shape(dp=2, tp=4)
        >>> sharding.groups("tp"), sharding.groups("dp")
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])
        """
        along = find_axes(self._names, axes)
        others = [dim for dim in range(self.ndim) if dim not in along]
        length = math.prod(self._layout.shape[dim] for dim in along)
        return list(self._layout.transpose(*others, *along).reshape(-1, length).tolist())

    def peers(self, rank: int, /, *axes: str) -> list[int]:
        """Return the one of ``groups(*axes)`` that contains ``rank``.

        >>> NamedSharding.from_shape(dp=2, tp=4).peers(6, "tp")
        [4, 5, 6, 7]
        """
        find_axes(self._names, axes)
        fixed = {axis: index for axis, index in self.get_worker_coords(rank).items() if axis not in axes}
        ranks, names = _layout.select(self._layout, self._names, fixed)
        return list(ranks.transpose([names.index(axis) for axis in axes]).ravel().tolist())

    def at(self, /, **coords: int | slice) -> NamedSharding | int:
        """Index by name as numpy does: an integer drops the axis, a slice keeps it, -1 is the last coordinate.

        Returns:
            The sharding of the remaining axes; as in numpy, an int when every axis has an integer.

        Raises:
            IndexError: an integer is outside its axis.
            ValueError: a slice is empty. A sharding needs at least one rank.

        >>> sharding = NamedSharding.from_shape(dp=4, tp=2)
        >>> sharding.at(dp=-1).shape, sharding.at(dp=slice(0, None, 2)).shape, sharding.at(dp=1, tp=1)
        ({'tp': 2}, {'dp': 2, 'tp': 2}, 3)
        """
        layout, names = _layout.select(self._layout, self._names, coords)
        return self._from_valid(layout, names) if names else int(layout)

    def piece_index(self, /, *axes: str) -> IntArray:
        """Return, for every rank in layout order, the row-major index of its coordinate along ``axes`` (read-only).

        >>> NamedSharding.from_shape(dp=2, tp=2).piece_index("tp", "dp")
        array([0, 2, 1, 3])
        """
        return self._piece_index(find_axes(self._names, axes))

    def leaders(self, /, *axes: str) -> BoolArray:
        """Return, for every rank in layout order, whether its coordinate is 0 along all of ``axes`` (read-only).

        >>> NamedSharding.from_shape(dp=2, tp=2).leaders("tp")
        array([ True, False,  True, False])
        """
        return self._leaders(find_axes(self._names, axes))

    def plan(
        self,
        in_sharded_axes: str | Iterable[str] = (),
        replicate_on_axes: str | Iterable[str] = (),
        output_is_replicated: str | Iterable[str] = (),
        make_dummy_calls_to_free_axes: bool = False,
    ) -> DispatchPlan:
        """Return which ranks are called, with which piece, and which return a result.

        The last 16 plans are cached: requesting one again takes microseconds.

        Args:
            in_sharded_axes: the worker at coordinate c gets piece c; several axes index nested pieces.
            replicate_on_axes: all workers along these axes get the same piece; no axis may be in both arguments.
                Axes in neither argument are *free*: only coordinate 0 along them is called.
            output_is_replicated: of the called workers, only coordinate 0 along these axes returns a result.
            make_dummy_calls_to_free_axes: also call the other coordinates along free axes, without a piece and
                without a result.

        >>> plan = NamedSharding.from_shape(dp=2, tp=2).plan(in_sharded_axes=["dp"], replicate_on_axes=["tp"])
        >>> plan.called, plan.piece
        (array([0, 1, 2, 3]), array([0, 0, 1, 1]))
        """
        arguments = as_axes(in_sharded_axes), as_axes(replicate_on_axes), as_axes(output_is_replicated)
        with suppress(TypeError):  # of the cache, which cannot hash some invalid names
            return self._plan(*arguments, bool(make_dummy_calls_to_free_axes))
        return DispatchPlan(self, *arguments, bool(make_dummy_calls_to_free_axes))  # it refuses them by name

    def to_device_mesh(self, device_type: str) -> Any:
        """Return a torch ``DeviceMesh`` of "cuda", "cpu", ...; every process has to call this. It needs torch."""
        try:
            torch = importlib.import_module("torch")
            mesh = importlib.import_module("torch.distributed.device_mesh")
        except ImportError as error:
            message = f"to_device_mesh() needs torch, which cannot be imported ({error}): pip install torch"
            raise ImportError(message, name="torch") from error
        return mesh.DeviceMesh(device_type, torch.tensor(self._layout.tolist()), mesh_dim_names=self._names)

    @classmethod
    def from_device_mesh(cls, mesh: Any) -> NamedSharding:
        """Return the sharding of a torch ``DeviceMesh``; ValueError if its dimensions have no names."""
        if not mesh.mesh_dim_names:
            raise ValueError(f"The mesh has no dimension names; make it with mesh_dim_names=(...): {mesh}")
        return cls(mesh.mesh.tolist(), mesh.mesh_dim_names)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which `from_dict` of any copy of this code reads.

        >>> NamedSharding.from_shape(dp=2, tp=4).to_dict()
        {'names': ['dp', 'tp'], 'shape': [2, 4], 'start': 0}
        """
        ranks = {"ranks": self._layout.ravel().tolist()} if self._start is None else {"start": self._start}
        return {"names": self.names, "shape": list(self._layout.shape), **ranks}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NamedSharding:
        """Return the sharding that `to_dict` described; ValueError for any other data.

        >>> NamedSharding.from_dict({"names": ["dp"], "shape": [3], "ranks": [3, 1, 2]}).layout
        array([3, 1, 2])
        """
        try:
            shape = tuple(as_int(size, "A size in the shape", 1) for size in data["shape"])
            if "start" in data and "ranks" in data:
                raise ValueError("The dict of a sharding has start and ranks: give one of them.")
            if "start" in data:
                return cls(_layout.make_layout(shape, as_int(data["start"], "The first rank", 0)), data["names"])
            return cls(_layout.as_layout(data["ranks"]).reshape(shape), data["names"])
        except KeyError as missing:
            raise ValueError(f"The dict of a sharding lacks {missing}; it has {list(data)}.") from None
        except TypeError as error:
            raise ValueError(f"This is not the dict of a sharding ({error}): {data!r}") from None

    def render(self) -> str:
        """Return the ranks as plain text, one grid of the last two axes for each coordinate along the others.

        >>> print(NamedSharding.from_shape(dp=2, tp=3).render())
        dp=2, tp=3 (6 ranks)
        <BLANKLINE>
              tp=0  tp=1  tp=2
        dp=0     0     1     2
        dp=1     3     4     5
        """
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        headline = f"{sizes} ({self.size} rank{'s' if self.size > 1 else ''})"
        return "\n\n".join([headline, *_layout.render_grids(self._layout, self._names)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self._layout.shape}, names={self.names}, layout={self._layout})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"A {type(self).__name__} is immutable: {name!r} cannot be set or deleted.")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self is other or self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    # Computed at the first use: a cached_property bypasses __setattr__ and is not pickled.

    @cached_property
    def _start(self) -> int | None:
        """The first rank if the others count up from it."""
        return int(self._layout.flat[0]) if _layout.is_counting(self._layout) else None

    @cached_property
    def _position(self) -> Callable[[int], int]:
        """The function from a rank to its position in layout order; only ranks that do not count up need a dict."""
        if self._start is not None:
            return range(self._start, self._start + self.size).index
        return {rank: position for position, rank in enumerate(self._layout.ravel().tolist())}.__getitem__

    @cached_property
    def _steps(self) -> list[tuple[str, int, int]]:
        """For each axis its name, the distance between the positions of its coordinates, and its size."""
        shape = self._layout.shape
        return [(name, math.prod(shape[dim + 1 :]), shape[dim]) for dim, name in enumerate(self._names)]

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """The parts that decide equality: the names, the shape, and the ranks, or the first of ranks that count up."""
        return self._names, self._layout.shape, self._layout.tobytes() if self._start is None else self._start

    @cached_property
    def _piece_index(self) -> Callable[..., IntArray]:
        return lru_cache(_MOST_CACHED)(partial(_layout.piece_index, self._layout.shape))

    @cached_property
    def _leaders(self) -> Callable[..., BoolArray]:
        return lru_cache(_MOST_CACHED)(lambda dims: read_only(self._piece_index(dims) == 0))

    @cached_property
    def _plan(self) -> Callable[..., DispatchPlan]:
        return lru_cache(_MOST_CACHED)(partial(DispatchPlan, self))
