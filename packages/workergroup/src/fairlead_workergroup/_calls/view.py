# SPDX-License-Identifier: Apache-2.0
"""Calling by named axes: all workers of a group, or a view of some of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, Unpack

from fairlead_sharding import NamedSharding

from .._deadline import check_timeout
from .call import Call
from .dispatch import dispatch
from .explain import CallExplanation, explain_call
from .map import Strategy, map_items
from .plan import Axes, CallPlan, Column, Mesh, as_axes, plan_call
from .sender import Sender
from .wait import ResultStream


@dataclass(frozen=True)
class CallOptions:
    """How a call is made, apart from the method's own arguments; as the keywords of `RayWorkerGroup.call`."""

    collect: Axes = None
    first_along: Axes = ()
    timeout: float | None = None
    retries: int = 0
    discard: bool = False


class _Options(TypedDict, total=False):
    """The fields of `CallOptions`, each of which may be missing."""

    collect: Axes
    first_along: Axes
    timeout: float | None
    retries: int
    discard: bool


class Balancing(NamedTuple):
    """How the items of `map` are distributed in a group.

    Attributes:
        strategy: which worker gets the next item.
        move_items: whether the items of a worker that dies go to the others.
    """

    strategy: Strategy
    move_items: bool


@dataclass(frozen=True)
class Addressed:
    """Workers of a group on named axes, and the calls to them.

    Attributes:
        sender: of the group.
        owner: the group, which must live as long as somebody waits for a call.
        mesh: the workers on their axes.
        balancing: of the group.
    """

    sender: Sender
    owner: object
    mesh: Mesh
    balancing: Balancing

    @property
    def coords(self) -> dict[int, dict[str, int]]:
        """The coordinates of each rank along the axes of the mesh."""
        names, sharding = self.mesh.names, self.mesh.sharding
        return {rank: sharding.get_worker_coords(rank) if names else {} for rank in self.mesh.ranks}

    def at(self, coords: dict[str, int | slice]) -> "Addressed":
        """Return the workers at coordinates."""
        return replace(self, mesh=self.mesh.at(coords))

    def with_options(self, options: CallOptions) -> "GroupView":
        """Return a view with these options, once they have been checked."""
        collect, first_along = _as_tuple(options.collect), as_axes(options.first_along)
        check_timeout("timeout", options.timeout)
        _check_retries(options.retries)
        plan_call(self.mesh, collect=collect, first_along=first_along, discard=options.discard)
        return GroupView(self, replace(options, collect=collect, first_along=first_along))

    def call(
        self, method: str | Callable[..., Any], options: CallOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        """Make a call; see `RayWorkerGroup.call`."""
        plan, columns, named = self._plan(options, args, kwargs)
        execution = dispatch(
            self.sender,
            self.owner,
            method,
            plan.called,
            columns,
            named,
            answers=plan.answers,
            returned=plan.returned,
            timeout_s=check_timeout("timeout", options.timeout),
            single=options.collect is not None and not as_axes(options.collect),
            discard=options.discard,
            retries=_check_retries(options.retries),
        )
        return Call(execution)

    def explain(
        self, method: str | Callable[..., Any], options: CallOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallExplanation:
        """Explain a call; see `RayWorkerGroup.explain`."""
        found = self.sender.method(method)
        plan, columns, named = self._plan(options, args, kwargs)
        found.check(columns, named)
        return explain_call(found.name, plan, args, kwargs, columns, named, found.function)

    def map(
        self,
        method: str | Callable[..., Any],
        items: Iterable[Any],
        options: CallOptions,
        *,
        max_in_flight: int,
        ordered: bool,
        strategy: Strategy | None,
        timeout: float | None,
        return_exceptions: bool,
    ) -> ResultStream[Any]:
        """Call a method for each item; see `RayWorkerGroup.map`."""
        meaningless = {"collect": options.collect, "first_along": options.first_along, "discard": options.discard}
        if given := [name for name, value in meaningless.items() if value not in (None, (), False)]:
            raise ValueError(
                f"map gives each item to one worker, so the options {given} of this view have no meaning. Use a view "
                "without them."
            )
        places = self.sender.roster.snapshot().places
        ranks = [rank for rank in self.mesh.ranks if places[rank].tied_rank == 0] or self.mesh.ranks
        return map_items(
            self.sender,
            self.owner,
            ranks,
            method,
            items,
            max_in_flight=max_in_flight,
            ordered=ordered,
            strategy=strategy or self.balancing.strategy,
            timeout_s=check_timeout("timeout", options.timeout if timeout is None else timeout),
            retries=options.retries,
            return_exceptions=return_exceptions,
            move_items=self.balancing.move_items,
        )

    def _plan(
        self, options: CallOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CallPlan, list[Column], dict[str, Column]]:
        plan = plan_call(
            self.mesh, collect=_as_tuple(options.collect), first_along=options.first_along, discard=options.discard
        )
        columns = [plan.column(f"positional argument {at}", value) for at, value in enumerate(args)]
        return plan, columns, {name: plan.column(f"argument {name!r}", value) for name, value in kwargs.items()}


class GroupView:
    """Some of a group's workers, or all of them with options; called, viewed and asked for ranks as the group is.

    Made by `at` and `with_options`. It holds nothing: when the group is shut down, so is the view.
    """

    def __init__(self, addressed: Addressed, options: CallOptions | None = None) -> None:
        self._addressed = addressed
        self._options = options

    def __repr__(self) -> str:
        mesh, name = self._addressed.mesh, self._addressed.sender.roster.name_prefix
        options = "" if self._options is None else f", {self._options}"
        shape = {} if mesh.single else mesh.sharding.shape
        return f"GroupView({name!r}, {shape}, ranks {_shorten(self.ranks)}{options})"

    @property
    def ranks(self) -> list[int]:
        """The ranks of its workers in the group, ascending."""
        return self._addressed.mesh.ranks

    @property
    def coords(self) -> dict[int, dict[str, int]]:
        """The coordinates of each rank here: along the axes that are left, counted from 0."""
        return self._addressed.coords

    @property
    def sharding_annotations(self) -> NamedSharding | None:
        """Its ranks on the axes that are left; None when all axes have been indexed away."""
        mesh = self._addressed.mesh
        return None if mesh.single else mesh.sharding

    @property
    def workers(self) -> list[Any]:
        """The actor handles of its workers, by ascending rank."""
        workers = self._addressed.sender.roster.handles  # which a shutdown on another thread replaces
        return [workers[rank] for rank in self.ranks] if workers else []

    def at(self, /, **coords: int | slice) -> "GroupView":
        """Return a view of the workers at these coordinates of the view; see `RayWorkerGroup.at`."""
        return GroupView(self._addressed.at(coords), self._options)

    def with_options(self, **options: Unpack[_Options]) -> "GroupView":
        """Return a view with other options; those that are not given stay as they are."""
        return self._addressed.with_options(replace(self._options or CallOptions(), **options))

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
        """Call a method, as of the group. With options set by `with_options`, all keywords are the method's."""
        options, kwargs = self._split(kwargs)
        return self._addressed.call(method, options, args, kwargs)

    def explain(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallExplanation:
        """Explain a call, as of the group. With options set by `with_options`, all keywords are the method's."""
        options, kwargs = self._split(kwargs)
        return self._addressed.explain(method, options, args, kwargs)

    def map(
        self,
        method: str | Callable[..., Any],
        items: Iterable[Any],
        /,
        *,
        max_in_flight: int = 2,
        ordered: bool = True,
        strategy: Strategy | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> ResultStream[Any]:
        """Call a method once for each item, each time on one worker of the view; see `RayWorkerGroup.map`.

        The `retries` and the `timeout` of `with_options` hold for each item; its other options have no meaning here.
        """
        return self._addressed.map(
            method,
            items,
            self._options or CallOptions(),
            max_in_flight=max_in_flight,
            ordered=ordered,
            strategy=strategy,
            timeout=timeout,
            return_exceptions=return_exceptions,
        )

    def _split(self, kwargs: dict[str, Any]) -> tuple[CallOptions, dict[str, Any]]:
        """Return the options of a call and the arguments of its method."""
        if self._options is not None:
            return self._options, kwargs
        given = {name: value for name, value in kwargs.items() if name in CallOptions.__dataclass_fields__}
        return CallOptions(**given), {name: value for name, value in kwargs.items() if name not in given}


def _check_retries(retries: int) -> int:
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries must be a whole number of at least 0, got {retries!r}")
    return retries


def _as_tuple(axes: Axes) -> tuple[str, ...] | None:
    """Return axes in a form that can be read twice, also when they came as an iterator."""
    return None if axes is None else as_axes(axes)


def _shorten(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return f"[{shown}, ...]" if len(ranks) > most else f"[{shown}]"
