# SPDX-License-Identifier: Apache-2.0
"""Who is called, with which piece of the data, and who answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._axes import find_all
from ._layout import IntArray
from ._render import shown, table

if TYPE_CHECKING:
    from ._sharding import NamedSharding

BoolArray = npt.NDArray[np.bool_]


def piece_index(shape: Sequence[int], dims: Sequence[int]) -> IntArray:
    """For every position in row-major order: the row-major index of its coordinate along ``dims``.

    >>> piece_index((2, 3), [1]).tolist(), piece_index((2, 3), [1, 0]).tolist()
    ([0, 1, 2, 0, 1, 2], [0, 2, 4, 1, 3, 5])
    """
    index = np.zeros((1,) * len(shape), dtype=np.int64)
    for dim in dims:
        coordinate = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        index = index * shape[dim] + coordinate
    return read_only(np.broadcast_to(index, shape).ravel())


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


@dataclass(frozen=True, repr=False)
class DispatchPlan:
    """The answer to one question put to `NamedSharding.plan`, which makes it.

    The question, as the arguments of `plan`, and the answer. Plans are equal when their questions are, and pickle as
    these. Arrays are read-only, with one entry per called rank unless said otherwise:

    - sharding, in_sharded_axes, replicate_on_axes, output_is_replicated, make_dummy_calls_to_free_axes: the question;
    - called: the ranks to call, ascending;
    - piece: which of the distinct pieces each gets; -1 for a dummy call;
    - answers: whether its result is wanted;
    - returned: the ranks that answer, ascending, as many as ``answers`` has true entries;
    - piece_shape: the sizes along ``in_sharded_axes``, so how the pieces must be nested;
    - n_pieces: how many distinct pieces there are; 1 when nothing is sharded.

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
        sharded = find_all(names, self.in_sharded_axes)
        replicated = find_all(names, self.replicate_on_axes)
        find_all(names, self.output_is_replicated)
        if both := [names[dim] for dim in sharded if dim in replicated]:
            raise ValueError(f"Axes cannot be both sharded and replicated: {both}.")

        free = [name for dim, name in enumerate(names) if dim not in (*sharded, *replicated)]
        gets_data = sharding.leaders(*free)
        piece = np.where(gets_data, sharding.piece_index(*self.in_sharded_axes), -1)
        answers = gets_data & sharding.leaders(*self.output_is_replicated)
        ranks = sharding.layout.ravel()
        if not self.make_dummy_calls_to_free_axes:
            ranks, piece, answers = ranks[gets_data], piece[gets_data], answers[gets_data]
        if (ranks[1:] < ranks[:-1]).any():
            ascending = np.argsort(ranks)
            ranks, piece, answers = ranks[ascending], piece[ascending], answers[ascending]
        shape = tuple(sharding.get_axis_size(axis) for axis in self.in_sharded_axes)
        arrays = {"called": ranks, "piece": piece, "answers": answers, "returned": ranks[answers]}
        # Past the refusal of a frozen dataclass to have its fields set.
        self.__dict__.update({name: read_only(array) for name, array in arrays.items()})
        self.__dict__.update(piece_shape=shape, n_pieces=math.prod(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, question.name) for question in fields(self) if question.init)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._summary()}>"

    def _summary(self) -> str:
        pieces = f"{self.n_pieces} piece{'' if self.n_pieces == 1 else 's'}"
        along = f" along {list(self.in_sharded_axes)}" if self.in_sharded_axes else ""
        called = f"{len(self.called)} of {self.sharding.size} ranks called"
        return f"{called}, {pieces}{along}, {len(self.returned)} answer"

    def pieces(self, nested: Any) -> list[Any]:
        """The distinct pieces as a flat list, which `piece` indexes, checked: none is missing or too many.

        ``nested`` has one level for each of `in_sharded_axes`. A level is anything with a length that is
        indexed by position: a list, a tuple, an array or tensor along its first dim. With nothing sharded,
        ``nested`` itself is the one piece, whatever it is.

        Raises:
            ValueError: a level does not have one element per coordinate of its axis.
            TypeError: a level is not such a sequence; strings, bytes, mappings and sets never are.

        >>> plan = NamedSharding.from_shape(dp=2, tp=2).plan(in_sharded_axes=["tp", "dp"])
        >>> plan.pieces([["tp0dp0", "tp0dp1"], ["tp1dp0", "tp1dp1"]])
        ['tp0dp0', 'tp0dp1', 'tp1dp0', 'tp1dp1']
        """
        level = [nested]
        for depth, (axis, size) in enumerate(zip(self.in_sharded_axes, self.piece_shape, strict=True)):
            for number, value in enumerate(level):
                if (found := _length(value)) != size:
                    path = "".join(f"[{i}]" for i in np.unravel_index(number, self.piece_shape[:depth]))
                    raise _misfit(f"depth {depth}, axis {axis!r} (pieces{path})", size, found, value)
            level = [value[i] for value in level for i in range(size)]
        return level

    def explain(self, max_rows: int = 40) -> str:
        """A table of who is called: rank, coordinates, piece, and whether the rank answers.

        Of more than ``max_rows`` ranks, the first and the last are shown.

        >>> plan = NamedSharding.from_shape(dp=2, tp=2).plan("dp", make_dummy_calls_to_free_axes=True)
        >>> print(plan.explain())
        4 of 4 ranks called, 2 pieces along ['dp'], 2 answer
        rank  dp  tp  piece  answers
           0   0   0      0      yes
           1   0   1   None       no
           2   1   0      1      yes
           3   1   1   None       no
        """
        rows = [["rank", *self.sharding.names, "piece", "answers"]]
        for i in shown(len(self.called), max_rows):
            if i is None:
                rows.append(["..."] * len(rows[0]))
                continue
            coords = self.sharding.get_worker_coords(self.called[i]).values()
            piece = "None" if self.piece[i] < 0 else str(self.piece[i])
            rows.append([str(self.called[i]), *map(str, coords), piece, "yes" if self.answers[i] else "no"])
        return f"{self._summary()}\n{table(rows)}"


def _length(value: Any) -> int | None:
    """How many pieces ``value`` holds, or None if it is no sequence."""
    # What has keys is a mapping or a table: there an index means a key or a column, not a position.
    if isinstance(value, (str, bytes, bytearray)) or hasattr(value, "keys"):
        return None
    try:
        return len(value) if hasattr(value, "__getitem__") else None
    except TypeError:  # an array or tensor without dims
        return None


def _misfit(where: str, expected: int, found: int | None, value: Any) -> Exception:
    if found is None:
        return TypeError(f"Expected a sequence of {expected} pieces at {where}, found a {type(value).__name__}.")
    return ValueError(f"Wrong number of pieces at {where}: expected {expected}, found {found}.")
