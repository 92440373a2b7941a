# SPDX-License-Identifier: Apache-2.0
"""The worker's side: the class each worker actor runs.

Shipped by value, so that a worker's Python needs nothing but Ray: this module imports the standard library, Ray, and
what is shipped with it, only. What it publishes about the worker is plain data in
`sys.modules["_fairlead_worker"]`.
"""

import asyncio
import inspect
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import ray
from ray.exceptions import RayError

from .describe import load
from .process import mark_tree, start_tick
from .progress import OverlappingRecord, Record
from .stacks import write_stacks_on_signal

__all__ = ["ConcurrentHost", "WorkerHost", "host_class", "make_portable"]

# Results that a worker has to run before there is a value. An ObjectRef is awaitable too, and is a value.
_UNFINISHED = frozenset((AsyncGeneratorType, CoroutineType, GeneratorType))
# What `fairlead_workergroup.testing` has workers do, as the record names it.
FAULTS = ("hang", "slow", "fill_memory")
# What the record calls a function that runs in place of a method.
FUNCTION = "<function>"
KINDS = ("plain", "generator", "async", "async_generator")


def _add_to_path(entries: Sequence[str]) -> None:
    """Put the entries of a PYTHONPATH where a Python that starts with it has them: before its own modules.

    Processes that the worker starts find them in the variable.
    """
    if not entries:
        return
    rest = [path for path in sys.path if path not in entries]
    library = os.path.dirname(os.__file__)
    at = rest.index(library) if library in rest else 0
    sys.path[:] = [*rest[:at], *dict.fromkeys(entries), *rest[at:]]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*entries, *(path for path in inherited if path)])


class WorkerHost:
    """Holds one instance of the user's class. `host_class` adds a method for each public method of it."""

    _fairlead_methods: tuple[str, ...] = ("__init__",)
    _fairlead_instance: Any = None
    _fairlead_record: Record
    _fairlead_record_class: type[Record] = Record
    _fairlead_own_loop: asyncio.AbstractEventLoop | None = None

    def _fairlead_start(
        self, facts: dict[str, Any], target: list[Any], args: list[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Make the worker: environment first, then the class, then the instance.

        Not `__init__`: an error there kills the actor and reaches the driver as text, here it keeps its type; and
        arguments that Ray would unpickle before `__init__` are fetched here, after the environment is set.

        Args:
            facts: what is published about the worker; as in `args` and `kwargs`, references in it are fetched.
            target: what to load the class from.
            args: positional arguments of its constructor.
            kwargs: keyword arguments of its constructor.
        """
        self._fairlead_prepare(facts)
        facts.update(_filled(facts, _values(facts.values(), ray.get)))
        cls = load(*_filled(target, _values(target, ray.get)))
        values = _values([*args, *kwargs.values()], ray.get)
        return self._fairlead_made(cls, _filled(args, values), _filled(kwargs, values))

    def _fairlead_prepare(self, facts: dict[str, Any]) -> None:
        """The environment and what is published of the worker, before a line of the user's is imported."""
        os.environ.update(facts["env"])
        _add_to_path(facts["path"])
        if "tree" in facts:
            self._fairlead_page = mark_tree(facts["tree"])
        self._fairlead_record = self._fairlead_record_class(self._fairlead_methods, write_stacks_on_signal())
        self._fairlead_key = self._fairlead_record.begin(0)
        published = types.ModuleType("_fairlead_worker")
        published.__dict__.update(facts=facts, record=self._fairlead_record)
        sys.modules["_fairlead_worker"] = published

    def _fairlead_made(self, cls: type, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            self._fairlead_instance = cls(*args, **kwargs)
        except BaseException as error:
            self._fairlead_failed("__init__", error)
            raise
        self._fairlead_record.end(self._fairlead_key)
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "started": start_tick(os.getpid()),
            "node_id": context.get_node_id(),
            "python": sys.executable,
            "accelerator_ids": context.get_accelerator_ids(),
        }

    def _fairlead_silent(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Run a method of which nobody wants the answer: nothing is stored, nothing travels back."""
        result = getattr(self, method)(*args, **kwargs)
        if inspect.isgenerator(result):
            for _ in result:
                pass

    def _fairlead_gathered_value(self, method: str, plan: list[Any], *flat: Any) -> Any:
        """Run a method with arguments that are lists of what other workers made; see `_regrouped`."""
        args, kwargs = _regrouped(plan, flat)
        return getattr(self, method)(*args, **kwargs)

    def _fairlead_gathered_items(self, method: str, plan: list[Any], *flat: Any) -> Any:
        """The same for a generator method: Ray streams only from what is one itself."""
        args, kwargs = _regrouped(plan, flat)
        for item in getattr(self, method)(*args, **kwargs):  # noqa: UP028  as in `_delegate`
            yield item

    def _fairlead_apply(self, name: str, pickled: bytes, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function with the user's instance as its first argument.

        Args:
            name: what errors call the function.
            pickled: the function.
            args: its other positional arguments.
            kwargs: its keyword arguments.
        """
        try:
            function = ray.cloudpickle.loads(pickled)
        except Exception as error:
            error.add_note(f"while the worker loaded the function {name!r}; its Python must have what it refers to")
            raise
        return function(self._fairlead_subject(), *args, **kwargs)

    def _fairlead_subject(self) -> Any:
        """Return the user's instance; the test kit puts another function here."""
        return self._fairlead_instance

    def _fairlead_run(self, name: str, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a function of the test kit's on this host; the record shows it as a method of that name."""
        key = self._fairlead_record.begin(self._fairlead_methods.index(name))
        try:
            return function(self, *args)
        finally:
            self._fairlead_record.end(key)

    def _fairlead_cleanup(self, method: str) -> None:
        result = getattr(self._fairlead_instance, method)()
        if inspect.isgenerator(result):
            for _ in result:
                pass
        else:
            self._fairlead_loop().run_until_complete(_run_to_its_end(result))

    def _fairlead_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of a worker whose async methods run one at a time."""
        if self._fairlead_own_loop is None:
            self._fairlead_own_loop = asyncio.new_event_loop()
        return self._fairlead_own_loop

    def _fairlead_failed(self, method: str, error: BaseException) -> None:
        """Prepare what a method has raised for its way to the caller.

        Raises:
            RayError: it is a KeyboardInterrupt, which would look like the caller's own; Ray calls it a cancelled task.
        """
        if isinstance(error, KeyboardInterrupt):
            told = RayError(f"{method!r} was interrupted in the worker, whose process goes on. {error}".rstrip())
            told.fairlead_type = "KeyboardInterrupt"
            raise told from error
        if isinstance(error, Exception) and not isinstance(error, RayError):
            make_portable(error)

    def _fairlead_value(self, method: str, result: Any) -> Any:
        """Return the value of a method that is no generator, whose result has to be run first."""
        return self._fairlead_loop().run_until_complete(_value(method, result))


class ConcurrentHost(WorkerHost):
    """A host whose async methods overlap: Ray runs the methods of a class with `async def` in it on one event loop."""

    _fairlead_record_class = OverlappingRecord

    async def _fairlead_start(  # type: ignore[override]
        self, facts: dict[str, Any], target: list[Any], args: list[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        self._fairlead_prepare(facts)
        facts.update(_filled(facts, await _awaited(facts.values())))
        cls = load(*_filled(target, await _awaited(target)))
        values = await _awaited([*args, *kwargs.values()])
        return self._fairlead_made(cls, _filled(args, values), _filled(kwargs, values))

    async def _fairlead_silent(self, method: str, /, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        await _run_to_its_end(getattr(self, method)(*args, **kwargs))

    async def _fairlead_gathered_value(self, method: str, plan: list[Any], *flat: Any) -> Any:
        args, kwargs = _regrouped(plan, flat)
        result = getattr(self, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def _fairlead_gathered_items(self, method: str, plan: list[Any], *flat: Any) -> Any:
        args, kwargs = _regrouped(plan, flat)
        items = getattr(self, method)(*args, **kwargs)
        if inspect.isasyncgen(items):
            async for item in items:
                yield item
        else:
            for item in items:
                yield item

    async def _fairlead_cleanup(self, method: str) -> None:  # type: ignore[override]
        await _run_to_its_end(getattr(self._fairlead_instance, method)())


async def _value(method: str, result: Any) -> Any:
    """Return the value of a coroutine, and refuse generators: Ray would give the first item of one as the value.

    Raises:
        TypeError: the method, which is no generator method itself, has returned a generator.
    """
    while inspect.isawaitable(result) and not isinstance(result, ray.ObjectRef):
        result = await result
    if isinstance(result, GeneratorType):
        result.close()
        raise TypeError(
            f"{method!r} returned a generator, but is not a generator method, so its items cannot be streamed. "
            f"Write `yield from ...` in {method!r} instead of `return ...`; if a decorator hides a generator method, "
            "have it use functools.wraps, or yield the items itself."
        )
    if isinstance(result, AsyncGeneratorType):
        await result.aclose()
        raise TypeError(
            f"{method!r} returned an async generator, but is not an async generator method, so its items cannot be "
            f"streamed. Make {method!r} an `async def` that yields them (`async for item in ...: yield item`); if a "
            "decorator hides an async generator method, have it use functools.wraps, or yield the items itself."
        )
    return result


def _items(method: str, result: Any) -> Any:
    """Return the iterator that a generator method has returned.

    Raises:
        TypeError: it has returned something else, because a decorator ran it.
    """
    if hasattr(result, "__next__") or hasattr(result, "__anext__"):
        return result
    if isinstance(result, CoroutineType):
        result.close()
    raise TypeError(
        f"{method!r} is a generator method, but its decorator returned {type(result).__name__} instead of its items. "
        f"If the decorator is meant to run the generator, delete the attribute `__wrapped__` of what it returns, and "
        f"{method!r} is called as a plain method."
    )


async def _run_to_its_end(result: Any) -> None:
    """What a method of any kind has returned, run where nobody wants what it gives."""
    if inspect.isawaitable(result):
        await result
    elif inspect.isasyncgen(result):
        async for _ in result:
            pass
    elif inspect.isgenerator(result):
        for _ in result:
            pass


def _values(arguments: Iterable[Any], get: Any) -> dict[Any, Any]:
    """The values of the references among arguments, all fetched at once."""
    refs = [value for value in arguments if isinstance(value, ray.ObjectRef)]
    return dict(zip(refs, get(refs), strict=True))


async def _awaited(arguments: Iterable[Any]) -> dict[Any, Any]:
    """As `_values`, without blocking the event loop."""
    refs = [value for value in arguments if isinstance(value, ray.ObjectRef)]
    return dict(zip(refs, await asyncio.gather(*refs), strict=True))


def _filled(arguments: Any, values: Mapping[Any, Any]) -> Any:
    """A list or dict of arguments with its references replaced by their values."""

    def value(argument: Any) -> Any:
        return values[argument] if isinstance(argument, ray.ObjectRef) else argument

    if isinstance(arguments, dict):
        return {name: value(argument) for name, argument in arguments.items()}
    return [value(argument) for argument in arguments]


def _regrouped(plan: list[Any], flat: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments from values that came one by one, as Ray looks for references among the arguments themselves only.

    The plan has (name or None, number of values or None) for each argument: None for one that is no list of values.
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


def host_class(
    name: str, kinds: Mapping[str, str], *, concurrent: bool = False, backpressure: Mapping[str, int] | None = None
) -> type:
    """A subclass of WorkerHost with one delegating method for each method of the user's class.

    A method per method, rather than one generic call: Ray streams only from real generator methods, and arguments
    inside a container are serialised as objects of their own, which makes every call slower.

    Args:
        name: of the class.
        kinds: kind of each method: plain, generator, async or async_generator.
        concurrent: async methods overlap; otherwise one method runs at a time, whatever its kind.
        backpressure: how many items a generator method may be ahead of its reader, for those with a limit.
    """
    base, delegate = (ConcurrentHost, _concurrent_delegate) if concurrent else (WorkerHost, _delegate)
    names = ("__init__", *kinds, FUNCTION, *FAULTS)
    members: dict[str, Any] = {"_fairlead_methods": names}
    for number, (method, kind) in enumerate(kinds.items(), 1):
        members[method] = function = delegate(f"_fairlead_instance.{method}", kind, number)
        if backpressure is not None and method in backpressure:
            ray.method(_generator_backpressure_num_objects=backpressure[method])(function)
    for kind in KINDS:
        members[f"_fairlead_function_{kind}"] = delegate("_fairlead_apply", kind, names.index(FUNCTION))
    for method, function in members.items():
        if method != "_fairlead_methods":
            function.__name__ = method
            function.__qualname__ = f"{WorkerHost.__name__}.{method}"
    return type(name, (base,), members)


def _delegate(path: str, kind: str, number: int) -> Any:
    """Return a method of a host that runs what is at a path of attributes of it, and records that it does."""
    find, method = operator.attrgetter(path), path.rpartition(".")[2]
    if kind == "plain":

        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            key = self._fairlead_record.begin(number)
            try:
                result = find(self)(*args, **kwargs)
                return self._fairlead_value(method, result) if type(result) in _UNFINISHED else result
            except BaseException as error:
                self._fairlead_failed(method, error)
                raise
            finally:
                self._fairlead_record.end(key)

    elif kind == "generator":

        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            key = self._fairlead_record.begin(number)
            try:
                # Not `yield from`: Ray sends into the generators it runs, which iterators of other kinds do not take.
                for item in _items(method, find(self)(*args, **kwargs)):
                    yield item
                    self._fairlead_record.progress()
            except BaseException as error:
                self._fairlead_failed(method, error)
                raise
            finally:
                self._fairlead_record.end(key)

    elif kind == "async":
        # A plain method: one `async def` on the class would make Ray run all of them at the same time.
        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            key = self._fairlead_record.begin(number)
            try:
                return self._fairlead_value(method, find(self)(*args, **kwargs))
            except BaseException as error:
                self._fairlead_failed(method, error)
                raise
            finally:
                self._fairlead_record.end(key)

    else:

        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            key = self._fairlead_record.begin(number)
            try:
                loop = self._fairlead_loop()
                items = _items(method, find(self)(*args, **kwargs))
                while True:
                    try:
                        item = loop.run_until_complete(anext(items))
                    except StopAsyncIteration:
                        return
                    yield item
                    self._fairlead_record.progress()
            except BaseException as error:
                self._fairlead_failed(method, error)
                raise
            finally:
                self._fairlead_record.end(key)

    return delegate


def _concurrent_delegate(path: str, kind: str, number: int) -> Any:
    find, method = operator.attrgetter(path), path.rpartition(".")[2]
    if kind in ("plain", "async"):
        # Ray runs plain methods of an asyncio actor on its event loop too.
        async def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            key = self._fairlead_record.begin(number)
            try:
                result = find(self)(*args, **kwargs)
                return await _value(method, result) if kind == "async" or type(result) in _UNFINISHED else result
            except BaseException as error:
                self._fairlead_failed(method, error)
                raise
            finally:
                self._fairlead_record.end(key)

        return delegate
    if kind == "async_generator":

        async def stream(self: Any, *args: Any, **kwargs: Any) -> Any:
            key = self._fairlead_record.begin(number)
            try:
                async for item in _items(method, find(self)(*args, **kwargs)):
                    yield item
                    self._fairlead_record.progress()
            except BaseException as error:
                self._fairlead_failed(method, error)
                raise
            finally:
                self._fairlead_record.end(key)

        return stream
    return _delegate(path, kind, number)


def make_portable(error: BaseException) -> None:
    """Have an exception pickle so that its copy has its class, its text and its attributes.

    Where its own way of pickling does not do that, its copy is made without calling `__init__`, and without what does
    not pickle; a note on the exception names what is left out. An exception that cannot be copied in this way either
    is left as it is.
    """
    for member in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        make_portable(member)
    if _is_kept(error):
        return
    left_out = [f"argument {at}" for at, value in enumerate(error.args) if not _pickles(value)]
    left_out += [f"attribute {name!r}" for name, value in vars(error).items() if not _pickles(value)]
    if left_out:
        error.add_note(f"left out on the way from the worker, as it does not pickle: {', '.join(left_out)}")
    args = tuple(value if _pickles(value) else f"<{type(value).__qualname__}>" for value in error.args)
    attributes = {name: value for name, value in vars(error).items() if _pickles(value)}
    cls = type(error)
    # That of a class of Python's own, such as OSError: a `__new__` of the user's may want other arguments.
    native = next(base for base in cls.__mro__ if base.__module__ == "builtins" and "__new__" in vars(base))
    # Also an attribute, as OSError leaves its arguments to an `__init__` of the user's.
    reduced = (native.__new__, (cls, *args), {**attributes, "args": args})
    vars(error)["__reduce_ex__"] = lambda protocol: reduced
    if type(_copied(error)) is not cls:
        del vars(error)["__reduce_ex__"]


def _is_kept(error: BaseException) -> bool:
    copy = _copied(error)
    try:
        return type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # noqa: BLE001  its __str__ is the user's, and may want what the copy lacks
        return False


def _pickles(value: Any) -> bool:
    return _copied((value,)) is not None


def _copied(value: Any) -> Any:
    """Return what a value is when it has travelled; None if it cannot."""
    try:
        return ray.cloudpickle.loads(ray.cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001  whatever the user's classes raise
        return None
