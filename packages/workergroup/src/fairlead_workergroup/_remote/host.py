# SPDX-License-Identifier: Apache-2.0
"""The class that each worker actor runs.

It is shipped by value, so that a worker's Python needs nothing but Ray. It publishes the facts about the worker as
plain data in `sys.modules["_fairlead_worker"]`.
"""

import asyncio
import collections
import inspect
import operator
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import ray
from ray.exceptions import AsyncioActorExit, RayError

from .describe import load
from .portable import make_portable
from .record import Record
from .setup import identify_process, set_up

# Results that a worker has to run to get a value. An ObjectRef is awaitable too, but it is a value.
_UNFINISHED = frozenset((AsyncGeneratorType, CoroutineType, GeneratorType))
# The end of a generator.
_END = object()
# The name in the record of a function that runs in place of a method.
FUNCTION = "<function>"


class WorkerHost:
    """Hold one instance of the user's class. `host_class` adds a method for each of its public methods."""

    _fairlead_methods: tuple[str, ...] = ("__init__",)
    _fairlead_instance: Any = None
    _fairlead_record: Record
    _fairlead_own_loop: asyncio.AbstractEventLoop | None = None

    def _fairlead_start(
        self, facts: dict[str, Any], target: list[Any], args: list[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Set the environment, load the class, and create the instance; return what only the process itself knows.

        This is not `__init__`, because an error there kills the actor and reaches the driver as text, while an error
        here keeps its type. Ray would also unpickle the arguments of `__init__` before the environment is set. The
        target is in a list, because references in it and in the arguments are fetched here.
        """
        self._fairlead_record = Record(self._fairlead_methods)
        with _MethodRun(self._fairlead_record, 0, "__init__"):
            self._fairlead_page = set_up(facts, self._fairlead_record)
            facts.update(_resolve(facts))
            cls = load(*_resolve(target))
            self._fairlead_instance = cls(*_resolve(args), **_resolve(kwargs))
        return identify_process()

    def _fairlead_give(self, value: Any, _: Any) -> Any:
        """Return a value when another one, which Ray waits for, is there; raise its error."""
        return value

    def _fairlead_begin(self, how: Mapping[str, Any], flat: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of this host, or a function in its place, as `how` describes; return its result as it is.

        It has the name of the `method`. If it has an `epoch`, a worker in another one refuses the request; `plan` is
        that of `_regroup`; with `function`, the first value is a pickled function.
        """
        method, epoch = how["method"], how.get("epoch")
        if epoch is not None and epoch != (own := sys.modules["_fairlead_worker"].facts["epoch"]):
            refusal = RayError(f"{method!r} was planned for epoch {epoch}, and this worker is in epoch {own}.")
            refusal.fairlead_epochs = epoch, own
            raise refusal
        if "plan" in how:
            flat, kwargs = _regroup(how["plan"], flat)
        if "function" in how:
            return self._fairlead_function(method, *flat, **kwargs)
        return getattr(self, method)(*flat, **kwargs)

    def _fairlead_call(self, how: Mapping[str, Any], /, *flat: Any, **kwargs: Any) -> Any:
        """Run a method or a function; see `_fairlead_begin`. With `silent`, drop its result, so that nothing is stored.

        With `alone`, nothing else runs in the meantime, which is so whenever a worker of this kind runs a method.
        """
        if how.get("first") is not None:
            self._fairlead_begin(how, [flat[0], *how["first"]], {})
        result = self._fairlead_begin(how, flat, kwargs)
        if "silent" in how:
            if inspect.isgenerator(result):
                collections.deque(result, maxlen=0)
            return None
        return result

    def _fairlead_iterate(self, how: Mapping[str, Any], /, *flat: Any, **kwargs: Any) -> Any:
        """Do the same for a generator method, because Ray streams only from generator methods."""
        for item in self._fairlead_begin(how, flat, kwargs):  # noqa: UP028  as in `_delegate`
            yield item

    def _fairlead_apply(self, name: str, pickled: bytes, /, *args: Any, **kwargs: Any) -> Any:
        """Call a pickled function with the user's instance as its first argument; errors show its name."""
        try:
            function = ray.cloudpickle.loads(pickled)
        except ModuleNotFoundError as error:
            raise TypeError(
                f"The function {name!r} needs the module {error.name!r}, which the worker cannot import. Install the "
                "module in the workers' Python, or call `ray.cloudpickle.register_pickle_by_value(module)` first."
            ) from error
        except Exception as error:
            error.add_note(f"while the worker loaded the function {name!r}; its Python must have what it refers to")
            raise
        return function(self._fairlead_instance, *args, **kwargs)

    def _fairlead_function(self, name: str, pickled: bytes, /, *args: Any, **kwargs: Any) -> Any:
        """Call a pickled function in place of a method."""
        with _MethodRun(self._fairlead_record, self._fairlead_methods.index(FUNCTION), name):
            result = self._fairlead_apply(name, pickled, *args, **kwargs)
            if type(result) in _UNFINISHED:
                result = self._fairlead_loop().run_until_complete(_value(name, result))
        return result

    def _fairlead_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of a worker whose async methods run one at a time."""
        if self._fairlead_own_loop is None:
            self._fairlead_own_loop = asyncio.new_event_loop()
        return self._fairlead_own_loop

    def _fairlead_take(self, items: Any) -> Iterator[Any]:
        """Iterate over the items of an async generator on that event loop."""
        while True:
            try:
                item = self._fairlead_loop().run_until_complete(anext(items))
            except StopAsyncIteration:
                return
            yield item


class _MethodRun:
    """Record that a method runs, and prepare the error that it raises."""

    def __init__(self, record: Record, number: int, method: str) -> None:
        self._record = record
        self._number = number
        self._method = method

    def __enter__(self) -> None:
        self._key = self._record.begin(self._number)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                _prepare_error(self._method, error)
        finally:
            self._record.end(self._key)


def _prepare_error(method: str, error: BaseException) -> None:
    """Prepare an error of a method for its way to the caller."""
    if isinstance(error, KeyboardInterrupt):  # Ray would take it for a cancellation
        raise RuntimeError(f"{method!r} was interrupted in the worker, whose process continues") from error
    if isinstance(error, Exception) and not isinstance(error, RayError):
        make_portable(error)


class _OverlappingRun(_MethodRun):
    """Do the same for a method that overlaps with others, and end the process if the method exits."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (SystemExit, AsyncioActorExit)):
            _end_process(error)
        super().__exit__(kind, error, trace)


def _end_process(error: BaseException) -> None:
    """End the process for an exit on the event loop. Ray would wait for the other methods, which may never end."""
    code = error.code if isinstance(error, SystemExit) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _start_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task of the event loop of a worker; asyncio would stop the loop at the SystemExit of one."""

    async def run() -> Any:
        try:
            return await coroutine
        except SystemExit as error:
            _end_process(error)

    return asyncio.Task(run() if asyncio.iscoroutine(coroutine) else coroutine, loop=loop, **options)


class ConcurrentHost(WorkerHost):
    """A host whose async methods overlap: Ray runs all methods of a class that has an `async def` on one event loop."""

    _fairlead_gate: asyncio.Lock  # held by a function that has the worker for itself

    async def _fairlead_pass(self) -> None:
        """Wait until no function has the worker for itself."""
        async with self._fairlead_gate:
            pass

    async def _fairlead_alone(self, how: Mapping[str, Any], flat: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method or a function when the methods that run have ended; later ones wait until it has."""
        async with self._fairlead_gate:
            deadline = time.monotonic() + how["alone"]
            if how.get("first") is not None:
                await self._fairlead_begin(how, [flat[0], *how["first"]], {})
            while self._fairlead_record.running:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{self._fairlead_record.running} methods were still running after {how['alone']:.1f} s, so "
                        f"{how['method']!r} was not called"
                    )
                await asyncio.sleep(0.001)
            return await self._fairlead_begin(how, flat, kwargs)

    async def _fairlead_function(self, name: str, pickled: bytes, /, *args: Any, **kwargs: Any) -> Any:
        with _OverlappingRun(self._fairlead_record, self._fairlead_methods.index(FUNCTION), name):
            result = self._fairlead_apply(name, pickled, *args, **kwargs)
            return await _value(name, result) if type(result) in _UNFINISHED else result

    async def _fairlead_start(  # type: ignore[override]
        self, facts: dict[str, Any], target: list[Any], args: list[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        self._fairlead_gate = asyncio.Lock()
        asyncio.get_running_loop().set_task_factory(_start_task)
        self._fairlead_record = Record(self._fairlead_methods)
        with _MethodRun(self._fairlead_record, 0, "__init__"):
            self._fairlead_page = set_up(facts, self._fairlead_record)
            facts.update(await _resolve_on_loop(facts))
            cls = load(*await _resolve_on_loop(target))
            self._fairlead_instance = cls(*await _resolve_on_loop(args), **await _resolve_on_loop(kwargs))
        return identify_process()

    # After the wait, the check of the epoch and the start of the method are one step of the event loop.
    async def _fairlead_call(self, how: Mapping[str, Any], /, *flat: Any, **kwargs: Any) -> Any:
        if "alone" in how:
            return await self._fairlead_alone(how, flat, kwargs)
        await self._fairlead_pass()
        result = self._fairlead_begin(how, flat, kwargs)
        if "silent" in how:
            await _run_to_end(result)
            return None
        return await result if inspect.isawaitable(result) else result

    async def _fairlead_iterate(self, how: Mapping[str, Any], /, *flat: Any, **kwargs: Any) -> Any:
        await self._fairlead_pass()
        items = self._fairlead_begin(how, flat, kwargs)
        if inspect.isasyncgen(items):
            async for item in items:
                yield item
        else:  # in a thread, as Ray runs plain generators
            while (item := await asyncio.to_thread(next, items, _END)) is not _END:
                yield item


async def _value(method: str, result: Any) -> Any:
    """Return the value of a coroutine, and refuse generators, whose first item Ray would return as the value."""
    while inspect.isawaitable(result) and not isinstance(result, ray.ObjectRef):
        result = await result
    if isinstance(result, AsyncGeneratorType):
        await result.aclose()
    elif isinstance(result, GeneratorType):
        result.close()
    else:
        return result
    raise TypeError(
        f"{method!r} returned a generator, but is not a generator method, so its items cannot be streamed. Yield them "
        "(`yield from ...`, or `async for item in ...: yield item` in an `async def`) instead of returning the "
        "generator; a decorator of a generator method has to use functools.wraps."
    )


async def _run_to_end(result: Any) -> None:
    """Run the result of a method of any kind to its end, and drop what it gives."""
    if inspect.isawaitable(result):
        await result
    elif inspect.isasyncgen(result):
        async for _ in result:
            pass
    elif inspect.isgenerator(result):
        collections.deque(result, maxlen=0)


def _resolve(arguments: Any) -> Any:
    """Return a list or dict of arguments with the references replaced by their values, fetched all at once."""
    return _fill(arguments, ray.get(_refs(arguments)))


async def _resolve_on_loop(arguments: Any) -> Any:
    """Do the same as `_resolve` without blocking the event loop."""
    return _fill(arguments, await asyncio.gather(*_refs(arguments)))


def _refs(arguments: Any) -> list[Any]:
    values = arguments.values() if isinstance(arguments, dict) else arguments
    return [value for value in values if isinstance(value, ray.ObjectRef)]


def _fill(arguments: Any, values: Iterable[Any]) -> Any:
    rest = iter(values)
    if isinstance(arguments, dict):
        return dict(zip(arguments, _fill(arguments.values(), rest), strict=True))
    return [next(rest) if isinstance(value, ray.ObjectRef) else value for value in arguments]


def _regroup(plan: list[Any], flat: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a method, put together from single values.

    The values travel one by one, because Ray resolves references only if they are arguments themselves. The plan has
    (name or None, number of values or None) for each argument; None stands for an argument that is not a list.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest = iter(flat)
    for name, count in plan:
        value = next(rest) if count is None else [next(rest) for _ in range(count)]
        if name is None:
            args.append(value)
        else:
            kwargs[name] = value
    return args, kwargs


def host_class(name: str, kinds: Mapping[str, str], *, concurrent: bool) -> type:
    """Return a subclass of WorkerHost with one delegating method for each method of the user's class.

    There is a method for each method instead of one generic call, because Ray streams only from real generator methods,
    and because arguments inside a container are serialised as separate objects, which makes every call slower.

    Unless they are `concurrent`, one method runs at a time, whatever its kind.
    """
    base, delegate = (ConcurrentHost, _concurrent_delegate) if concurrent else (WorkerHost, _delegate)
    names = ("__init__", *kinds, FUNCTION)
    members = {method: delegate(method, kind, number) for number, (method, kind) in enumerate(kinds.items(), 1)}
    for method, function in members.items():
        function.__name__ = method
        function.__qualname__ = f"{WorkerHost.__name__}.{method}"
    return type(name, (base,), {"_fairlead_methods": names, **members})


def _delegate(method: str, kind: str, number: int, running: type[_MethodRun] = _MethodRun) -> Any:
    """Return a method of a host that runs a method of the user's instance, and records that it does."""
    find = operator.attrgetter(f"_fairlead_instance.{method}")
    if "generator" in kind:

        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            with running(self._fairlead_record, number, method):
                items = find(self)(*args, **kwargs)
                # Not `yield from`: Ray sends into the generators that it runs, which other iterators do not support.
                for item in items if kind == "generator" else self._fairlead_take(items):
                    yield item
                    self._fairlead_record.progress()

    else:
        # A plain method also for "async": one `async def` on the class would make Ray run all methods at the same time.
        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _MethodRun(self._fairlead_record, number, method):
                result = find(self)(*args, **kwargs)
                if kind == "async" or type(result) in _UNFINISHED:
                    result = self._fairlead_loop().run_until_complete(_value(method, result))
            return result

    return delegate


def _concurrent_delegate(method: str, kind: str, number: int) -> Any:
    """Do the same as `_delegate` for a host whose async methods overlap."""
    find = operator.attrgetter(f"_fairlead_instance.{method}")
    if kind == "generator":
        return _delegate(method, kind, number, _OverlappingRun)  # Ray runs it in another thread
    if kind == "async_generator":

        async def stream(self: Any, *args: Any, **kwargs: Any) -> Any:
            await self._fairlead_pass()
            with _OverlappingRun(self._fairlead_record, number, method):
                async for item in find(self)(*args, **kwargs):
                    yield item
                    self._fairlead_record.progress()

        return stream

    # Ray runs plain methods of an asyncio actor on its event loop too.
    async def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
        await self._fairlead_pass()
        with _OverlappingRun(self._fairlead_record, number, method):
            result = find(self)(*args, **kwargs)
            return await _value(method, result) if kind == "async" or type(result) in _UNFINISHED else result

    return delegate
