# SPDX-License-Identifier: Apache-2.0
"""Calling by named axes, on a group or on a view of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from fairlead_sharding import NamedSharding

from .._deadline import check_timeout
from .call import Call
from .explain import CallExplanation, explained_call
from .map import Strategy, mapped
from .plan import Axes, CallPlan, Column, Mesh, as_axes, plan_call
from .wait import ResultStream

if TYPE_CHECKING:
    from .._group import RayWorkerGroup

Result = TypeVar("Result")
Item = TypeVar("Item")

__all__ = ["Addressed", "CallOptions", "GroupView"]


@dataclass(frozen=True)
class CallOptions:
    """How a call is made, apart from the method's own arguments; as the keywords of `RayWorkerGroup.call`."""

    collect: Axes = None
    first_along: Axes = ()
    timeout: float | None = None
    retries: int = 0
    discard: bool = False


class _Options(TypedDict, total=False):
    """The fields of `CallOptions`, of which any may be missing."""

    collect: Axes
    first_along: Axes
    timeout: float | None
    retries: int
    discard: bool


class Addressed:
    """What a group and its views offer: their workers on named axes, called together."""

    _mesh: Mesh
    _options = CallOptions()

    @property
    def _of_group(self) -> RayWorkerGroup:
        raise NotImplementedError

    @property
    def ranks(self) -> list[int]:
        """The ranks of its workers in the group, ascending."""
        return self._mesh.ranks

    @property
    def coords(self) -> dict[int, dict[str, int]]:
        """Of each rank, its coordinates here: along the axes that are left, counted from 0."""
        names = self._mesh.names
        return {rank: self._mesh.sharding.get_worker_coords(rank) if names else {} for rank in self.ranks}

    def at(self, /, **coords: int | slice) -> GroupView:
        """A view of the workers at these coordinates: an integer drops the axis, a slice keeps it.

        As in numpy: -1 is the last, and what a slice leaves is counted from 0. The view is called as the group is.

        Raises:
            ValueError: an axis that does not exist, or a slice that selects nobody.
            IndexError: a coordinate outside its axis; names the axis and its size.
        """
        return GroupView(self._of_group, self._mesh.at(coords), self._bound_options)

    def with_options(
        self,
        *,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
    ) -> GroupView:
        """A view whose `call` is made with these options, and hands every keyword on to the method.

        For methods whose parameters are named as our options are.

        Args:
            collect, first_along, timeout, retries, discard: as of `call`.

        Raises:
            TypeError, ValueError: an axis that does not exist, or options that contradict each other.
        """
        return self._with(CallOptions(collect, first_along, timeout, retries, discard))

    def _with(self, options: CallOptions) -> GroupView:
        """A view with these options, once they have been checked."""
        collect, first_along = _kept(options.collect), as_axes(options.first_along)
        check_timeout("timeout", options.timeout)
        _checked_retries(options.retries)
        plan_call(self._mesh, collect=collect, first_along=first_along, discard=options.discard)
        return GroupView(self._of_group, self._mesh, replace(options, collect=collect, first_along=first_along))

    @property
    def _bound_options(self) -> CallOptions | None:
        return None

    @overload
    def call(
        self,
        method: str,
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call: ...
    @overload
    def call(self, method: Callable[..., Any], /, *args: Any, discard: Literal[True], **kwargs: Any) -> Call[None]: ...
    @overload
    def call(
        self, method: Callable[..., Coroutine[Any, Any, Result]], /, *args: Any, collect: tuple[()], **kwargs: Any
    ) -> Call[Result]: ...
    @overload
    def call(
        self,
        method: Callable[..., Coroutine[Any, Any, Result]],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call[list[Result]]: ...
    @overload
    def call(
        self,
        method: Callable[..., Iterator[Item] | AsyncIterator[Item]],
        /,
        *args: Any,
        collect: tuple[()],
        **kwargs: Any,
    ) -> Call[list[Item]]: ...
    @overload
    def call(
        self,
        method: Callable[..., Iterator[Item] | AsyncIterator[Item]],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call[list[list[Item]]]: ...
    @overload
    def call(self, method: Callable[..., Result], /, *args: Any, collect: tuple[()], **kwargs: Any) -> Call[Result]: ...
    @overload
    def call(
        self,
        method: Callable[..., Result],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call[list[Result]]: ...
    def call(
        self,
        method: str | Callable[..., Any],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call:
        """Call a method of all workers here, and say who gets what and who answers.

        Every argument goes to all of them alike unless it is wrapped: `Shard(values, *axes)`, `PerWorker(values)`. An
        ObjectRef or a `Call` among them is passed on; the driver sees nothing of it. Small plain values travel with
        the call, everything else is stored once, however many workers get it.

        A function is a method of the class if the class has it, inherited or decorated or under another name, and
        the name of that method is called. Every other function is pickled: by value, or by name if it is from an
        installed package or from the package that the workers import their class from.

        On a running event loop a call that has to wait, for a restart or for calls of other threads, is sent later: it
        is returned at once, and asking for its results raises what would be raised here otherwise.

        Args:
            method: its name; or the method itself, `Model.loss`; or any other function, which runs in each worker with
                the user's instance as its first argument: `f(worker, *args, **kwargs)`.
            args: positional arguments of the method.
            collect: None: everybody called answers, a list by rank. Axes: one answer for each coordinate along them,
                row-major in the order given, by the worker at coordinate 0 of all others. `()`: one worker answers.
            first_along: only coordinate 0 along these is called.
            timeout: seconds until `CallTimeoutError`, from now; None: the group's `call_timeout_s`.
            retries: how often `result` and `await` repeat it on workers that it lost, after starting them again;
                with `restart_scope="group"`, on all. Needs a group with `restart_on_failure`.
            discard: nobody answers, and nothing that the method returns is stored.
            kwargs: keyword arguments of the method.

        Raises:
            AttributeError, TypeError: there is no such method, it does not take these arguments, or the function
                cannot be pickled.
            ValueError: an axis that does not exist, too few or too many pieces or values, or options that contradict
                each other or the group.
            WorkerFailureError: a worker that would be called is known to be dead, and not restarted.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        return self._called(method, CallOptions(collect, first_along, timeout, retries, discard), args, kwargs)

    def explain(
        self,
        method: str | Callable[..., Any],
        /,
        *args: Any,
        collect: Axes = None,
        first_along: Axes = (),
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> CallExplanation:
        """What `call` with these arguments would do: who gets which piece, what is stored, who answers.

        Nothing is stored or called. Print it, or look at it in a notebook.

        Raises:
            AttributeError, TypeError, ValueError: as of `call`.
        """
        return self._explained(method, CallOptions(collect, first_along, timeout, retries, discard), args, kwargs)

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
        """Call a method once for each item, each time on one worker; return the results for `for` and `async for`.

        The first worker of each tied group takes part; so, without tied groups, all do. Items are taken one by one, as
        workers become free and results are asked for. A progress bar shows on a terminal when it takes over a second.

        Args:
            method: its name, or a function, as of `call`; an item is its only argument.
            items: what to work on.
            max_in_flight: how many items each worker has at a time: the next one is there when one is done.
            ordered: results in the order of the items, else as they come.
            strategy: who gets the next item: "round_robin"; "least_loaded", whoever has fewest; or a function of the
                number of items each worker has now, that returns which of them; None: the group's
                `load_balancing_strategy`.
            timeout: seconds that one item may take, its time in a worker's queue included; None: that of
                `with_options`, or else the group's `call_timeout_s`.
            return_exceptions: give the exception of an item that fails as its result and go on with the others. An item
                that runs out of time runs on, and its value is dropped. The loss of the last worker is raised.

        The `retries` of `with_options` hold for each item; its other options have no meaning here.

        Raises:
            AttributeError, TypeError, ValueError: there is no such method, or a bad argument, or an option of
                `with_options` that has no meaning here.
            WorkerGroupError: the group, or its Ray, has been shut down.
            CallTimeoutError: an item took longer than `timeout`.
            WorkerFailureError: a worker was lost. With the group's `enable_load_balancing`, its items go to the others,
                so that an item may be worked on twice; an item that three workers were lost with is given up.
            Exception: a worker's own exception, with its type and a note that names the item. What other workers have
                been given is cancelled.
        """
        group = self._of_group
        options = self._bound_options or CallOptions()
        meaningless = {"collect": options.collect, "first_along": options.first_along, "discard": options.discard}
        if given := [name for name, value in meaningless.items() if value not in (None, (), False)]:
            raise ValueError(
                f"map gives each item to one worker, so the options {given} of this view have no meaning. Use a view "
                "without them."
            )
        leaders = set(group.dp_leader_worker_indices)
        ranks = [rank for rank in self.ranks if rank in leaders] or self.ranks
        return mapped(
            group,
            ranks,
            method,
            items,
            max_in_flight=max_in_flight,
            ordered=ordered,
            strategy=strategy or group._load_balancing_strategy,
            timeout_s=check_timeout("timeout", options.timeout if timeout is None else timeout),
            retries=options.retries,
            return_exceptions=return_exceptions,
        )

    def _called(
        self, method: str | Callable[..., Any], options: CallOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        plan, columns, named = self._planned(options, args, kwargs)
        return self._of_group._dispatch(
            method,
            plan.called,
            columns,
            named,
            answers=plan.answers,
            returned=plan.returned,
            timeout_s=check_timeout("timeout", options.timeout),
            single=options.collect is not None and not as_axes(options.collect),
            discard=options.discard,
            retries=_checked_retries(options.retries),
        )

    def _explained(
        self, method: str | Callable[..., Any], options: CallOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallExplanation:
        found = self._of_group._class.method(method)
        plan, columns, named = self._planned(options, args, kwargs)
        found.check(columns, named)
        return explained_call(found.name, plan, args, kwargs, columns, named, found.function)

    def _planned(
        self, options: CallOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CallPlan, list[Column], dict[str, Column]]:
        plan = plan_call(
            self._mesh, collect=_kept(options.collect), first_along=options.first_along, discard=options.discard
        )
        columns = [plan.column(f"positional argument {at}", value) for at, value in enumerate(args)]
        return plan, columns, {name: plan.column(f"argument {name!r}", value) for name, value in kwargs.items()}


def _checked_retries(retries: int) -> int:
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries must be a whole number of at least 0, got {retries!r}")
    return retries


def _kept(axes: Axes) -> tuple[str, ...] | None:
    """Axes that can be read twice, also when they came as an iterator."""
    return None if axes is None else as_axes(axes)


class GroupView(Addressed):
    """Some of a group's workers, or all of them with options; called, viewed and asked for ranks as the group is.

    Made by `at` and `with_options`. It holds nothing: when the group is shut down, so is the view.
    """

    def __init__(self, group: RayWorkerGroup, mesh: Mesh, options: CallOptions | None = None) -> None:
        self._group = group
        self._mesh = mesh
        self._bound = options

    def __repr__(self) -> str:
        shape = {} if self._mesh.single else self._mesh.sharding.shape
        options = "" if self._bound is None else f", {self._bound}"
        return f"GroupView({self._group.name_prefix!r}, {shape}, ranks {_shortened(self.ranks)}{options})"

    @property
    def _of_group(self) -> RayWorkerGroup:
        return self._group

    @property
    def _bound_options(self) -> CallOptions | None:
        return self._bound

    @property
    def sharding_annotations(self) -> NamedSharding | None:
        """Its ranks on the axes that are left; None when all axes have been indexed away."""
        return None if self._mesh.single else self._mesh.sharding

    @property
    def workers(self) -> list[Any]:
        """The actor handles of its workers, by ascending rank."""
        workers = self._group.workers  # which a shutdown on another thread empties
        return [workers[rank] for rank in self.ranks] if workers else []

    def with_options(self, **options: Unpack[_Options]) -> GroupView:
        """As of the group; options that are not given stay as they are."""
        return self._with(replace(self._bound or CallOptions(), **options))

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
        """As of the group. With options set by `with_options`, all keywords are the method's."""
        if self._bound is None:
            return super().call(method, *args, **kwargs)
        return self._called(method, self._bound, args, kwargs)

    def explain(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallExplanation:
        """As of the group. With options set by `with_options`, all keywords are the method's."""
        if self._bound is None:
            return super().explain(method, *args, **kwargs)
        return self._explained(method, self._bound, args, kwargs)


def _shortened(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return f"[{shown}, ...]" if len(ranks) > most else f"[{shown}]"
