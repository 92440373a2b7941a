# SPDX-License-Identifier: Apache-2.0
"""The plan of a call: which workers it reaches, the request to each, and which of them return a result."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from ray import ObjectRef

from fairlead_sharding import NamedSharding

from .. import _world
from .._arguments import Arguments, Gathered, NotPicklableError, PassedOn, PerWorker, Shard, is_inlined
from .._membership.core import Core, PlannedCall
from .._replies import Request
from .._start.worker_class import Method
from .._world import NEVER, Deadline, check_timeout
from ..exceptions import StaleGroupError

Axes = str | Iterable[str] | None
# The workers that an explanation shows.
MOST_ROWS = 40


def as_axes(axes: Axes) -> tuple[str, ...]:
    """Return one name, several names or None as a tuple of names."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True)
class CallOptions:
    """The options of a call, which are the keywords of `RayWorkerGroup.call`."""

    collect: Axes = None
    timeout: float | None = field(default=None, compare=False)  # the plan of a call depends on the others only
    retries: int = field(default=0, compare=False)
    discard: bool = False

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_timeout("timeout", self.timeout)
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries must be a whole number of at least 0, got {self.retries!r}")
        # Axes may come as an iterator, which can be read only once. `__dict__` bypasses the frozen dataclass.
        if self.collect is not None:
            self.__dict__["collect"] = as_axes(self.collect)


def select(sharding: NamedSharding, coords: Mapping[str, int | slice]) -> NamedSharding:
    """Return the axes of the workers at some coordinates. An integer drops its axis; a single worker has one axis."""
    check_axes(sharding, coords)
    selected = sharding.at(**coords) if coords else sharding
    return selected if isinstance(selected, NamedSharding) else NamedSharding([selected], ["worker"])


def first_of(sharding: NamedSharding, axes: Axes) -> NamedSharding:
    """Return the axes of the workers at coordinate 0 along some axes."""
    return select(sharding, dict.fromkeys(as_axes(axes), 0))


def check_axes(sharding: NamedSharding, axes: Iterable[str]) -> None:
    """Refuse axes that there are not."""
    for axis in axes:
        if axis == "rank" and axis not in sharding.names:
            first = sorted_ranks(sharding)[0]
            raise ValueError(
                f"Invalid axis name: 'rank'. Give coordinates along {list(sharding.names)}: those of rank {first} are "
                f"{sharding.get_worker_coords(first)}."
            )
        sharding.get_axis_index(axis)


def sorted_ranks(sharding: NamedSharding) -> list[int]:
    """Return the ranks in ascending order."""
    ranks: list[int] = np.sort(sharding.layout, axis=None).tolist()
    return ranks


@dataclass(frozen=True)
class Column:
    """The values of one argument for all called workers."""

    values: Sequence[Any]  # distinct
    index: Sequence[int] | None = None  # the position of each called worker's value, -1 for None; None if all share one

    def map(self, function: Callable[[Any], Any]) -> "Column":
        """Return the column with a function applied to each distinct value."""
        return Column([function(value) for value in self.values], self.index)

    def expand(self, count: int) -> list[Any]:
        """Return the values of `count` called workers in order."""
        if self.index is None:
            return [self.values[0]] * count
        return [None if index < 0 else self.values[index] for index in self.index]


@dataclass(frozen=True)
class Recipients:
    """The workers that a call reaches. Requests, futures and columns are in the order of `called`."""

    called: list[int]
    returned: list[int]  # in the order of the results; a rank that is not called has no result
    answers: list[bool] | None  # of each called worker; None if all return a result

    @cached_property
    def positions(self) -> tuple[list[int], list[int]]:
        """The positions of the workers that return a result, in the order of the results, and those of the others."""
        if self.returned == self.called:
            return list(range(len(self.called))), []
        index = {rank: position for position, rank in enumerate(self.called)}
        wanted = [index[rank] for rank in self.returned if rank in index]
        return wanted, sorted(set(index.values()).difference(wanted))


@dataclass(frozen=True)
class CallPlan(Recipients):
    """The recipients of a call, in ascending order, with which it finds the piece of each argument for each of them."""

    sharding: NamedSharding

    def column(self, value: Any) -> Column:
        """Return an argument as a column. It is replicated unless it is a `Shard` or a `PerWorker`."""
        if isinstance(value, Shard):
            return self._shard_column(value)
        if isinstance(value, PerWorker):
            return column_per_worker(value.values, len(self.called))
        return Column([value])

    def _shard_column(self, shard: Shard) -> Column:
        check_axes(self.sharding, shard.axes)
        others = [axis for axis in self.sharding.names if axis not in shard.axes]
        layout = self.sharding.plan(in_sharded_axes=shard.axes, replicate_on_axes=others)
        if isinstance(shard.values, PassedOn):
            pieces = shard.values.as_arguments()
            if len(pieces) != layout.n_pieces:
                raise ValueError(f"{len(pieces)} results, but {layout.n_pieces} pieces along {list(shard.axes)}")
        else:
            try:
                pieces = layout.pieces(shard.values)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error} {_explain_shard(self.sharding, shard)}") from None
        return Column(pieces, layout.piece.tolist())


def explain_plan(plan: CallPlan, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what a call with a plan would do, as a table. Nothing is stored or called."""
    columns = make_columns(method, args, kwargs, plan.column)
    places = {rank: str(place) for place, rank in enumerate(plan.returned)}
    values = [method.function, *(value for column in columns for value in column.values)]
    stored = {id(value) for value in values if not (isinstance(value, (ObjectRef, PassedOn)) or is_inlined(value))}
    names = [f"argument {index}" for index in range(len(args))] + list(kwargs)
    lines = [["rank", *plan.sharding.names, *names, "result"]]
    for index, rank in enumerate(plan.called[:MOST_ROWS]):
        pieces = ["the same" if column.index is None else f"piece {column.index[index]}" for column in columns]
        coords = map(str, plan.sharding.get_worker_coords(rank).values())
        lines.append([str(rank), *coords, *pieces, places.get(rank, "no")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
    if len(plan.called) > MOST_ROWS:
        shown.append(f"and {len(plan.called) - MOST_ROWS} other workers")
    summary = (
        f"{method.name}: {len(plan.called)} of {plan.sharding.size} workers called, {len(stored)} value(s) stored, "
        f"{len(plan.returned)} result(s)"
    )
    return "\n".join([summary, *shown])


def _explain_shard(sharding: NamedSharding, shard: Shard) -> str:
    """Return what the values of a `Shard` have to be."""
    axes = ", ".join(map(repr, shard.axes))
    sizes = [sharding.get_axis_size(axis) for axis in shard.axes]
    if len(sizes) > 1:
        levels = " of ".join(f"{size} for {axis!r}" for axis, size in zip(shard.axes, sizes, strict=True))
        return f"Shard(values, {axes}) takes nested sequences, one level for each axis: {levels}."
    return (
        f"Shard(values, {axes}) takes one piece for each of the {sizes[0]} coordinates along {axes}: split the values "
        f"into {sizes[0]} pieces, an array for example with numpy.array_split(values, {sizes[0]})."
    )


def column_per_worker(values: Any, count: int) -> Column:
    """Return the column in which each of `count` called workers gets its own value from a sequence."""
    if isinstance(values, PassedOn):
        values = values.as_arguments()
    elif isinstance(values, (str, bytes)) or hasattr(values, "keys") or not hasattr(values, "__getitem__"):
        raise TypeError(f"it must be a list with a value per worker called, got {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"it has {len(values)} values, but {count} workers are called: give one for each, by rank")
    return Column([values[index] for index in range(count)], range(count))


def replicate(value: Any) -> Column:
    """Return the column in which all called workers get the same value."""
    return Column([value])


def make_columns(
    method: Method,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    make: Callable[[Any], Column],  # returns the column of a value that is none
    prepare: Callable[[Any], Any] | None = None,  # returns the object that travels in place of a value
) -> list[Column]:
    """Return the arguments of a call as columns, those by name last; errors name the argument and the method."""
    method.check(len(args), tuple(kwargs))
    columns = []
    for index, value in enumerate((*args, *kwargs.values())):
        try:
            column = value if isinstance(value, Column) else make(value)
            columns.append(column if prepare is None else column.map(prepare))
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError, NotPicklableError):  # raised by a class of the user
                raise
            name = list(kwargs)[index - len(args)] if index >= len(args) else method.parameter(index)
            kind = ValueError if type(error) is ValueError else TypeError
            raise kind(f"argument {name!r} of {method.name!r}: {error}") from None
    return columns


def make_requests(
    method: Method, recipients: Recipients, columns: Sequence[Column], names: Sequence[str], epoch: int | None = None
) -> Sequence[Request]:
    """Return the request to each recipient in order; the last columns are the keyword arguments of these names.

    A worker in another epoch than the given one refuses the request.
    """
    gathers = any(isinstance(value, Gathered) for column in columns for value in column.values)
    is_same = recipients.answers is None and not gathers and all(column.index is None for column in columns)
    count, positional = 1 if is_same else len(recipients.called), len(columns) - len(names)
    rows = zip(*(column.expand(count) for column in columns), strict=True) if columns else [()] * count
    requests = []
    for row, answers in zip(rows, recipients.answers or [True] * count, strict=True):
        how: dict[str, Any] = {} if epoch is None else {"epoch": epoch}
        args, kwargs = list(row[:positional]), dict(zip(names, row[positional:], strict=True))
        if gathers:
            how["plan"], *args = _flatten(args, kwargs)
            kwargs = {}
        if not answers:
            how["silent"] = True
        requests.append(_make_request(method, how, args, kwargs))
    return requests * len(recipients.called) if is_same else requests


def _make_request(method: Method, how: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Request:
    """Return the request that runs a method, or the function in its place, as `how` says; see `_fairlead_begin`."""
    if method.function is not None:
        how = {"function": True, **how}
    if not how:
        return Request(method.name, args, kwargs)
    how = {"method": method.name, **how}
    if method.result == "items" and "silent" not in how:  # Ray streams only from generator methods
        return Request("_fairlead_iterate", [how, *args], kwargs)
    return Request("_fairlead_call", [how, *args], kwargs)


def _flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return a plan of the arguments, followed by each single value: Ray finds references at the top level only.

    The plan has a pair `(name or None, number of values or None)` for each argument. The number is None for an argument
    that is not a list.
    """
    plan: list[tuple[str | None, int | None]] = []
    flat: list[Any] = []
    for name, value in (*((None, value) for value in args), *kwargs.items()):
        is_list = isinstance(value, Gathered)
        plan.append((name, len(value) if is_list else None))
        flat.extend(value if is_list else [value])
    return [plan, *flat]


def prepare_call(
    core: Core,
    method: Method,
    recipients: Recipients,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CallOptions,
    *,
    column: Callable[[Any], Column] = replicate,  # returns who gets which part of an argument
    sharding: NamedSharding | None = None,
    is_hook: bool = False,
    replan: Callable[[], tuple[Recipients, NamedSharding]] | None = None,  # if its values fit any size of the group
) -> PlannedCall:
    """Check a call, and store the values that have to be stored."""
    began = _world.current.now()
    if options.retries:
        core.check_retries(options.retries)
    timeout_s = core.call_timeout_s if options.timeout is None else options.timeout
    deadline = NEVER if timeout_s is None else Deadline(began + timeout_s)
    call = PlannedCall(method, recipients, (), began, deadline, options, sharding, is_hook=is_hook)
    if not is_hook:
        try:
            core.admit(call)  # before anything is stored
        except StaleGroupError:
            if replan is None:
                raise
    # Before this call's turn: storing a large value must not delay the calls of other threads.
    prepare, names = Arguments().prepare, list(kwargs)
    columns = make_columns(method, args, kwargs, column, prepare)
    if method.function is not None:
        columns = [Column([prepare(method.function)]), *columns]

    def finish(recipients: Recipients, sharding: NamedSharding | None) -> PlannedCall:
        epoch = None if core.is_owner else core.now.group_epoch
        requests = make_requests(method, recipients, columns, names, epoch)
        again = None if replan is None else lambda: finish(*replan())
        return replace(call, recipients=recipients, requests=requests, sharding=sharding, replan=again)

    return finish(recipients, sharding)


@lru_cache(maxsize=64)
def make_plan(sharding: NamedSharding, options: CallOptions) -> CallPlan:
    """Plan a call; `RayWorkerGroup.call` describes the options."""
    collect: Any = options.collect  # a tuple or None
    check_axes(sharding, collect or ())
    if len(set(collect or ())) != len(collect or ()):
        raise ValueError(f"an axis is named twice: {list(collect)}")
    if options.discard and collect is not None:
        raise ValueError(f"discard=True returns no results, so there is nothing to collect along {list(collect)}")
    names = sharding.names
    silent = [] if collect is None else [axis for axis in names if axis not in collect]
    plan = sharding.plan(replicate_on_axes=names, output_is_replicated=silent)
    called, returned, answers = plan.called.tolist(), plan.returned, plan.answers
    if collect:
        pieces = sharding.plan(in_sharded_axes=collect)
        returned = pieces.called[np.argsort(pieces.piece)]
    if options.discard:
        returned, answers = returned[:0], np.zeros_like(answers)
    return CallPlan(called, returned.tolist(), None if answers.all() else answers.tolist(), sharding)
