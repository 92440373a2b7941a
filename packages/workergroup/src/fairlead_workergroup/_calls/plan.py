# SPDX-License-Identifier: Apache-2.0
"""Who is called, with which of an argument's values, and who answers. Pure: numpy and nothing of Ray."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fairlead_sharding import NamedSharding

from .._arguments import PassedOn, PerWorker, Shard

Axes = str | Iterable[str] | None


def as_axes(axes: Axes) -> tuple[str, ...]:
    """One name, or several, or none, as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True)
class Mesh:
    """The workers a call goes to, on the axes it may name.

    Attributes:
        sharding: their ranks on these axes.
        single: whether every axis was indexed away: one worker, and no axis to name.
    """

    sharding: NamedSharding
    single: bool = False

    def at(self, coords: dict[str, int | slice]) -> "Mesh":
        """Fewer workers, by numpy's rule: an integer drops the axis, a slice keeps it.

        Raises:
            ValueError: an axis that does not exist, or a slice that selects nothing.
            IndexError: a coordinate outside its axis; names both.
        """
        self.check(coords)
        found = self.sharding.at(**coords) if coords else self.sharding
        if isinstance(found, NamedSharding):
            return replace(self, sharding=found)
        return Mesh(NamedSharding([found], ["worker"]), single=True)

    def check(self, axes: Iterable[str]) -> None:
        """Refuse axes by which this cannot be addressed.

        Raises:
            ValueError: names the axis, and those there are.
        """
        for axis in axes:
            if self.single:
                raise ValueError(f"Invalid axis name: {axis!r}. This is a view of one worker, which has no axes left")
            self.sharding.get_axis_index(axis)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that may be named."""
        return () if self.single else tuple(self.sharding.names)

    @property
    def ranks(self) -> list[int]:
        """Ascending."""
        ranks: list[int] = np.sort(self.sharding.layout, axis=None).tolist()
        return ranks


@dataclass(frozen=True)
class Column:
    """One argument of a call, over all called workers.

    Attributes:
        values: the distinct values.
        index: which of them each called worker gets, -1 for None; None if all get the only one.
    """

    values: Sequence[Any]
    index: Sequence[int] | None = None

    def mapped(self, function: Callable[[Any], Any]) -> "Column":
        """With a function applied to each distinct value."""
        return Column([function(value) for value in self.values], self.index)

    def over(self, count: int) -> list[Any]:
        """The value of each of `count` called workers, in order."""
        if self.index is None:
            return [self.values[0]] * count
        return [None if at < 0 else self.values[at] for at in self.index]


@dataclass(frozen=True)
class CallPlan:
    """Who is called and who answers; lists have an entry for each called worker.

    Attributes:
        called: their ranks, ascending.
        answers: whether each one's result is wanted; None: all are.
        returned: the ranks that answer, in the order their results are wanted.
        coordinate_0: axes of which only coordinate 0 is called.
    """

    mesh: Mesh
    called: list[int] = field(compare=False)
    answers: list[bool] | None = field(compare=False)
    returned: list[int] = field(compare=False)
    coordinate_0: tuple[str, ...] = ()

    def column(self, what: str, value: Any) -> Column:
        """An argument of the call, replicated unless it says otherwise.

        Raises:
            ValueError: too few or too many pieces or values, or an axis that is not there or is not called.
            TypeError: pieces that are no sequence.
        """
        if isinstance(value, Shard):
            return self._sharded(what, value)
        if isinstance(value, PerWorker):
            values = _sequence(what, value.values)
            if len(values) != len(self.called):
                raise ValueError(f"{what} has {len(values)} values, but {len(self.called)} workers are called")
            return Column([values[at] for at in range(len(values))], range(len(values)))
        return Column([value])

    def _sharded(self, what: str, shard: Shard) -> Column:
        try:
            self.mesh.check(shard.axes)
            if uncalled := [axis for axis in shard.axes if axis in self.coordinate_0]:
                raise ValueError(f"cannot be split along {uncalled}, of which only coordinate 0 is called")
            everybody = self.mesh.sharding.plan(in_sharded_axes=shard.axes)
            if isinstance(shard.values, PassedOn):
                pieces = shard.values.answers()
                if len(pieces) != everybody.n_pieces:
                    raise ValueError(f"{len(pieces)} answers, but {everybody.n_pieces} pieces along {list(shard.axes)}")
            else:
                pieces = everybody.pieces(shard.values)
            return Column(pieces, _pieces(self.mesh, shard.axes, self.coordinate_0))
        except (TypeError, ValueError) as error:
            error.add_note(f"in {what}")
            raise


def plan_call(mesh: Mesh, *, collect: Axes = None, first_along: Axes = (), discard: bool = False) -> CallPlan:
    """Plan a call; plans are kept, so asking again costs next to nothing.

    Args:
        mesh: whom the call is for.
        collect: None: everybody called answers. Axes: one answer for each coordinate along them, row-major in the
            order given; of the workers there, the one at coordinate 0 of all other axes answers. None of them: one.
        first_along: along these only coordinate 0 is called.
        discard: nobody answers.

    Raises:
        ValueError: an axis that does not exist or is named twice, or is both collected and in `first_along`; `collect`
            together with `discard`.

    >>> mesh = Mesh(NamedSharding([[3, 1], [2, 0]], ["dp", "tp"]))
    >>> plan = plan_call(mesh, collect="dp")
    >>> plan.called, plan.returned
    ([0, 1, 2, 3], [3, 2])
    """
    wanted = None if collect is None else as_axes(collect)
    first = as_axes(first_along)
    for axes in (wanted or (), first):
        mesh.check(axes)
        if len(set(axes)) != len(axes):
            raise ValueError(f"an axis is named twice: {list(axes)}")
    if both := [axis for axis in wanted or () if axis in first]:
        raise ValueError(f"axes {both} cannot be collected: with first_along only their coordinate 0 is called")
    if discard and wanted is not None:
        raise ValueError(f"discard=True means that nobody answers; there is nothing to collect along {list(wanted)}")
    return _planned(mesh, wanted, first, discard)


@lru_cache(maxsize=64)
def _planned(mesh: Mesh, collect: tuple[str, ...] | None, first: tuple[str, ...], discard: bool) -> CallPlan:
    sharding = mesh.sharding
    ranks, is_called = sharding.layout.ravel(), sharding.leaders(*first)
    is_answer = is_called & (not discard)
    if collect is not None:
        is_answer = sharding.leaders(*(axis for axis in sharding.names if axis not in collect))
    returned = ranks[is_answer]
    if collect is None:
        returned = np.sort(returned)
    elif collect:
        returned = returned[np.argsort(sharding.piece_index(*collect)[is_answer])]
    order = _ascending(ranks, is_called)
    return CallPlan(
        mesh,
        called=ranks[order].tolist(),
        answers=None if is_answer[order].all() else is_answer[order].tolist(),
        returned=returned.tolist(),
        coordinate_0=first,
    )


@lru_cache(maxsize=64)
def _pieces(mesh: Mesh, axes: tuple[str, ...], first: tuple[str, ...]) -> list[int]:
    """Which piece along `axes` each called worker gets."""
    sharding = mesh.sharding
    order = _ascending(sharding.layout.ravel(), sharding.leaders(*first))
    pieces: list[int] = sharding.piece_index(*axes)[order].tolist()
    return pieces


def _ascending(ranks: npt.NDArray[np.int64], is_called: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Where in layout order the called ranks are, by ascending rank."""
    (called,) = np.nonzero(is_called)
    return called[np.argsort(ranks[called])]


def _sequence(what: str, values: Any) -> Any:
    """What has a length and is indexed by position; strings, sets and what has keys is not."""
    if isinstance(values, PassedOn):
        return values.answers()
    if isinstance(values, (str, bytes)) or hasattr(values, "keys") or not hasattr(values, "__getitem__"):
        raise TypeError(f"{what} must be a list with a value per worker called, got {type(values).__name__}")
    return values
