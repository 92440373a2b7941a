# SPDX-License-Identifier: Apache-2.0
"""The calling methods of a group and of its views, with the types of their results."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, overload

from fairlead_sharding import NamedSharding

from .._arguments import PerWorker, Shard
from .._membership.core import Core
from .._replies import ResultStream
from ..exceptions import StaleGroupError, format_ranks
from .call import Call, send_call
from .map import ItemMap, MapOptions, Strategy
from .plan import Axes, CallOptions, CallPlan, explain_plan, make_plan, prepare_call, select, sorted_ranks

Result = TypeVar("Result")
Item = TypeVar("Item")

AsyncMethod = Callable[..., Coroutine[Any, Any, Result]]
GeneratorMethod = Callable[..., Iterator[Item] | AsyncIterator[Item]]


class ViewOptions(TypedDict, total=False):
    """The fields of `CallOptions`, each of which may be missing."""

    collect: Axes
    timeout: float | None
    retries: int
    discard: bool


class Target:
    """The workers that a call goes to: those at the coordinates of each view on a path, on the present axes."""

    def __init__(
        self,
        core: Core,
        map_options: MapOptions,
        options: CallOptions | None = None,  # those that `with_options` has set
        path: tuple[dict[str, int | slice], ...] = (),
    ) -> None:
        self.core = core
        self.map_options = map_options
        self.options = options
        self.path = path
        sharding = core.now.sharding
        self.known = sharding, self._select(sharding)

    def _select(self, sharding: NamedSharding) -> NamedSharding:
        for coords in self.path:
            sharding = select(sharding, coords)
        return sharding

    @property
    def sharding(self) -> NamedSharding:
        """The axes of the workers."""
        return self.find_axes()[1]

    def find_axes(self) -> tuple[NamedSharding, NamedSharding]:
        """Return the axes of the whole group, and those of the workers."""
        now = self.core.now
        if self.known[0] is not now.sharding:
            try:
                self.known = now.sharding, self._select(now.sharding)
            except (IndexError, ValueError) as error:
                raise StaleGroupError(
                    f"{error} The group has been resized to {dict(now.sharding.shape)}. This view works again when it "
                    "has grown.",
                    now.group_epoch,
                ) from None
        return self.known

    def call(
        self,
        owner: object,
        method: str | Callable[..., Any],
        options: CallOptions,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Call:
        """Make a call; see `RayWorkerGroup.call`. Its owner is the group, which stays alive until its end."""
        if not self.core.is_owner:
            self.core.renew()
        called = self.core.worker_class.method(method)
        sharding, own = self.find_axes()
        plan = make_plan(own, options)

        def plan_again() -> tuple[CallPlan, NamedSharding]:
            sharding, own = self.find_axes()
            return make_plan(own, options), sharding

        # Values that were split for the size that the group had cannot be sent when it has another one.
        is_split = any(isinstance(value, (Shard, PerWorker)) for value in (*args, *kwargs.values()))
        replan = None if is_split else plan_again
        planned = prepare_call(
            self.core, called, plan, args, kwargs, options, column=plan.column, sharding=sharding, replan=replan
        )
        return send_call(self.core, owner, planned)


class AddressedWorkers:
    """Workers on named axes, with the members that a group and its views share.

    The target does not refer to the group, which must be released when its last reference is.
    """

    _target: Target

    @property
    def _owner(self) -> object:
        """The group."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return the same object: a copy of what holds a group refers to the same workers."""
        return self

    def at(self, /, **coords: int | slice) -> "GroupView":
        """Return a view of the workers at these coordinates: an integer drops the axis, a slice keeps it.

        As in numpy, -1 is the last coordinate, and the coordinates that a slice keeps are counted from 0. Without
        coordinates, the view has all workers.

        Returns:
            A view. It calls its workers as the group does, explains calls, and lists its ranks and coordinates.

        Raises:
            ValueError: an axis does not exist, or a slice selects no worker.
            IndexError: a coordinate is outside its axis; the message names the axis and its size.
        """
        target = self._target
        target.core.renew()
        target.find_axes()  # refuses a view that has no workers now
        path = (*target.path, coords)
        return GroupView(self._owner, Target(target.core, target.map_options, target.options, path))

    def with_options(self, **options: Unpack[ViewOptions]) -> "GroupView":
        """Return a view whose `call` uses these options and passes every keyword on to the method.

        Use it for methods that have parameters with the names of options.

        Args:
            options: `collect`, `timeout`, `retries` and `discard`, as for `call`. Options that are not
                given stay as they are.

        Returns:
            A view of the same workers.

        Raises:
            TypeError, ValueError: an axis does not exist, or options contradict each other.
        """
        target = self._target
        all_options = replace(target.options or CallOptions(), **options)
        make_plan(target.sharding, all_options)
        return GroupView(self._owner, Target(target.core, target.map_options, all_options, target.path))

    def map(
        self,
        method: str | Callable[..., Any],
        items: Iterable[Any],
        /,
        *,
        max_in_flight: int = 2,
        ordered: bool = True,
        strategy: Strategy | None = None,
        move_items: bool | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> ResultStream[Any]:
        """Call a method once for each item, each time on one worker.

        The first worker of each tied group takes part; without tied groups, every worker does. Items are taken one by
        one, as workers become free and results are requested. After one second a progress bar appears on a terminal.

        The `timeout` of `with_options` holds for each item; its other options have no meaning here.

        Args:
            method: its name, or a function, as for `call`; an item is its only argument.
            items: the items, one for each call.
            max_in_flight: the number of items that each worker has at a time, so that the next item is there when one
                is done.
            ordered: whether results come in the order of the items; otherwise they come as they finish.
            strategy: chooses the worker of the next item: "round_robin"; "least_loaded", the worker with the fewest
                items; or a function that takes the number of items of each worker and returns the position of one
                worker. None uses the group's `load_balancing_strategy`, which is "round_robin" by default.
            move_items: if a worker dies, give its items to the others, so that an item may run twice; None uses the
                group's `enable_load_balancing`, which is False by default.
            timeout: the seconds that one item may take, including its time in a worker's queue; None uses the timeout
                of `with_options`, or else the group's `Timeouts.call_s`.
            return_exceptions: return the exception of an item that fails as its result and continue with the others.
                An item that times out runs to its end, and its value is dropped. The loss of the last worker is
                raised.

        Returns:
            A stream of results for `for` and `async for`.

        Raises:
            AttributeError, TypeError, ValueError: there is no such method, an argument is not valid, or an option of
                `with_options` has no meaning here.
            WorkerGroupError: the group, or its Ray, has been shut down.
            CallTimeoutError: an item took longer than `timeout`.
            WorkerFailureError: a worker was lost; with `move_items`, the last worker, or three workers with one item.
            Exception: a worker's own exception, with its type and a note that names the item. The items of other
                workers are cancelled.
        """
        target = self._target
        target.core.renew()
        options = target.options or CallOptions()
        names = ("collect", "retries", "discard")
        if given := [name for name in names if getattr(options, name) not in (None, (), False)]:
            raise ValueError(
                f"map gives each item to one worker, so the options {given} of this view have no meaning. Use a view "
                "without them."
            )
        now, all_ranks = target.core.now, sorted_ranks(target.sharding)
        ranks = [rank for rank in all_ranks if now.members[rank].place.tied_rank == 0] or all_ranks
        each = CallOptions((), timeout=options.timeout if timeout is None else timeout)
        map_options = replace(
            target.map_options,
            max_in_flight=max_in_flight,
            ordered=ordered,
            strategy=strategy or target.map_options.strategy,
            move_items=target.map_options.move_items if move_items is None else move_items,
            return_exceptions=return_exceptions,
            each=each,
        )
        return ResultStream(ItemMap(target.core, self._owner, ranks, method, items, map_options).results)


class GroupView(AddressedWorkers):
    """Some workers of a group, or all of them, with the same calling methods as the group.

    `at` and `with_options` return it. It holds no resources, and ends with its group.

    A view follows the resizes of its group: it has the workers that its coordinates and slices select on the present
    axes. While there are none, everything that needs the workers raises `StaleGroupError`.
    """

    def __init__(self, group: object, target: Target) -> None:
        self._group = group
        self._target = target

    @property
    def _owner(self) -> object:
        return self._group

    def __repr__(self) -> str:
        target = self._target
        sharding = target.known[1]
        options = "" if target.options is None else f", {target.options}"
        ranks = format_ranks(sorted_ranks(sharding))
        return f"GroupView({target.core.name_prefix!r}, {dict(sharding.shape)}, ranks [{ranks}]{options})"

    @property
    def ranks(self) -> list[int]:
        """The ranks of the workers in the group, in ascending order."""
        return sorted_ranks(self._target.sharding)

    @property
    def coords(self) -> dict[int, dict[str, int]]:
        """The coordinates of each rank, counted from 0 along the axes that are left."""
        sharding = self._target.sharding
        return {rank: sharding.get_worker_coords(rank) for rank in sorted_ranks(sharding)}

    @property
    def sharding_annotations(self) -> NamedSharding:
        """The ranks on the axes that are left; one axis `worker` when all axes have been indexed away."""
        return self._target.sharding

    @property
    def workers(self) -> list[Any]:
        """The actor handles of the workers, by ascending rank; empty after the shutdown of the group."""
        workers = self._target.core.handles  # a shutdown on another thread replaces the list
        return [workers[rank] for rank in self.ranks] if workers else []

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
        """Call a method, as `RayWorkerGroup.call` does. After `with_options`, all keywords are the method's.

        Returns:
            The call.
        """
        options, kwargs = split_options(self._target.options, kwargs)
        return self._target.call(self._group, method, options, args, kwargs)

    def explain(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
        """Return what `call` with these arguments would do: pieces, stored values and results.

        Nothing is stored or called.

        Returns:
            The text of a table with a line for each called worker, to be printed.

        Raises:
            AttributeError, TypeError, ValueError: as `call` does.
        """
        target = self._target
        options, kwargs = split_options(target.options, kwargs)
        called = target.core.worker_class.method(method)
        return explain_plan(make_plan(target.sharding, options), called, args, kwargs)


def split_options(chosen: CallOptions | None, kwargs: dict[str, Any]) -> tuple[CallOptions, dict[str, Any]]:
    """Return the options of a call and the keyword arguments of its method."""
    if chosen is not None:
        return chosen, kwargs
    given = {name: value for name, value in kwargs.items() if name in CallOptions.__dataclass_fields__}
    return CallOptions(**given), {name: value for name, value in kwargs.items() if name not in given}


class TypedCalls(AddressedWorkers):
    """The calling methods of a group and of its handles."""

    @overload
    def call(
        self,
        method: str,
        /,
        *args: Any,
        collect: Axes = None,
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call: ...
    @overload
    def call(self, method: Callable[..., Any], /, *args: Any, discard: Literal[True], **kwargs: Any) -> Call[None]: ...
    @overload
    def call(self, method: AsyncMethod[Result], /, *args: Any, collect: tuple[()], **kwargs: Any) -> Call[Result]: ...
    @overload
    def call(self, method: AsyncMethod[Result], /, *args: Any, **kwargs: Any) -> Call[list[Result]]: ...
    @overload
    def call(
        self, method: GeneratorMethod[Item], /, *args: Any, collect: tuple[()], **kwargs: Any
    ) -> Call[list[Item]]: ...
    @overload
    def call(self, method: GeneratorMethod[Item], /, *args: Any, **kwargs: Any) -> Call[list[list[Item]]]: ...
    @overload
    def call(self, method: Callable[..., Result], /, *args: Any, collect: tuple[()], **kwargs: Any) -> Call[Result]: ...
    @overload
    def call(self, method: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Call[list[Result]]: ...
    def call(
        self,
        method: str | Callable[..., Any],
        /,
        *args: Any,
        collect: Axes = None,
        timeout: float | None = None,
        retries: int = 0,
        discard: bool = False,
        **kwargs: Any,
    ) -> Call:
        """Call a method of all workers, with the arguments and results that the options describe.

        Every worker gets the same arguments, except for those that are wrapped: `Shard(values, *axes)` and
        `PerWorker(values)`. An ObjectRef or a `Call` is passed on, and the driver does not fetch it. Small plain values
        travel with the call; every other value is stored once, however many workers get it.

        If the class has the given function as a method, inherited or decorated or under another name, that method is
        called. `ray.cloudpickle` pickles every other function: by name if its module can be imported, else by value.
        For a module that workers lack, call `ray.cloudpickle.register_pickle_by_value(module)` first.

        On a running event loop, a call that has to wait for a restart or for calls of other threads is sent later. It
        is returned at once, and its results raise the errors that are raised here otherwise.

        Args:
            method: the name of the method; the method itself, `Model.loss`; or any other function but a generator,
                which runs in each worker with the user's instance as its first argument:
                `f(worker, *args, **kwargs)`.
            args: positional arguments of the method.
            collect: None if every called worker returns a result, which makes a list by rank. With axes, one worker for
                each coordinate along them returns a result, the one at coordinate 0 of all other axes; the list is
                row-major in the order given. With `()`, one worker returns a result.
            timeout: the seconds from now until `CallTimeoutError`; None uses the group's `Timeouts.call_s`.
            retries: how often `result` and `await` repeat the call on workers that were lost, after their restart; with
                `Restart(scope="group")`, on all workers. Needs a group with `Restart(on_failure=True)`.
            discard: no worker returns a result, and the value that the method returns is not stored.
            kwargs: keyword arguments of the method.

        Returns:
            The call, which may be still running.

        Raises:
            AttributeError, TypeError: there is no such method, it does not take these arguments, or the function
                cannot be pickled.
            ValueError: an axis does not exist, there are too few or too many pieces or values, or options contradict
                each other or the group.
            WorkerFailureError: a worker that would be called is known to be dead, and the group does not restart it.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        options = CallOptions(collect, timeout, retries, discard)
        return self._target.call(self, method, options, args, kwargs)
