# SPDX-License-Identifier: Apache-2.0
"""The user's class as the driver knows it, whether or not it can import it, and functions in place of its methods."""

import functools
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ray
from ray.actor import ActorClass
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._observe.failures import remote_traceback
from .._ray_private import dumps_by_value
from .._remote.describe import describe, kind_of, undecorated
from .._remote.host import host_class
from ..exceptions import WorkerStartError

__all__ = [
    "Method",
    "WorkerClass",
    "describe_class",
    "full_function_name",
    "full_name",
    "function_kind",
    "function_name",
    "is_installed",
    "pickled_function",
    "shipped",
    "signature_without_worker",
]


@dataclass(frozen=True)
class Method:
    """What a worker can be asked to run: a public method of the user's class, or a function in place of one.

    Attributes:
        name: of the method or the function.
        kind: plain, generator, async or async_generator.
        signature: its parameters, where Python can tell.
        function: the pickled function, or a reference to it; None for a method.
        backpressure: the number of items after which a generator waits until one of them is read; None for no limit.
    """

    name: str
    kind: str
    signature: inspect.Signature | None
    function: Any = None
    backpressure: int | None = None

    @property
    def hosted(self) -> str:
        """The method of the host that runs it."""
        return self.name if self.function is None else f"_fairlead_function_{self.kind}"

    @property
    def result(self) -> str:
        """What a call gives: "value", or "items" one after the other."""
        return "items" if self.kind in ("generator", "async_generator") else "value"

    def parameter(self, at: int) -> str | int:
        """Return the name of the parameter that takes a positional argument, or its number where that has no name."""
        parameters = [] if self.signature is None else list(self.signature.parameters.values())
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        return named[at] if at < len(named) else at

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments the method does not take, before any worker is asked.

        Raises:
            TypeError: as calling the method would.
        """
        if self.signature is None:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None


@dataclass(frozen=True)
class WorkerClass:
    """A user's class as described by the process that can import it.

    Attributes:
        target: what a worker loads it from: its full name, or its pickled bytes.
        name: its short name.
        methods: its public methods.
        options: what its own `@ray.remote(...)` or `_default_options` asks for.
        configurations: what its `configure_worker` answered for each worker; None if it has none.
        concurrent: whether its async methods are to overlap.
        cls: the class itself, if it was given and not only named.
        full_names: `module.Class.method` of the function of each method.
    """

    target: str | bytes
    name: str
    methods: Mapping[str, Method]
    options: Mapping[str, Any] = field(default_factory=dict)
    configurations: Sequence[tuple[dict[str, Any], ...]] | None = None
    concurrent: bool = False
    cls: type | None = None
    full_names: Mapping[str, str] = field(default_factory=dict)

    def configuration(self, rank: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
        """(resources, env_vars, init_kwargs, runtime_env overrides) for one worker, empty where nothing was said."""
        answer = () if self.configurations is None else self.configurations[rank]
        resources, env_vars, init_kwargs, overrides = (*answer, {}, {}, {}, {})[:4]
        return resources, env_vars, init_kwargs, overrides

    @cached_property
    def actor_class(self) -> Any:
        """The generated Ray actor class that hosts it."""
        kinds = {method.name: method.kind for method in self.methods.values()}
        backpressure = {m.name: m.backpressure for m in self.methods.values() if m.backpressure is not None}
        host = host_class(self.name, kinds, concurrent=self.concurrent, backpressure=backpressure)
        return ray.remote(host)

    def method(self, method: str | Callable[..., Any]) -> Method:
        """Return what a worker runs for a method's name, a method of the class, or any other function.

        Raises:
            AttributeError: there is no method of this name; lists those there are.
            TypeError: neither a name nor a function that can run in a worker.
        """
        if not isinstance(method, str):
            function = _without_ray(method)
            name = self._name_of(function)
            return self._in_place_of_method(function) if name is None else self.methods[name]
        if method not in self.methods:
            raise AttributeError(f"{self.name} has no public method {method!r}; it has {sorted(self.methods)}")
        return self.methods[method]

    def _name_of(self, function: Any) -> str | None:
        """Return the name of the method that a function is, whatever the function itself is called."""
        own = _unbound(function)
        if self.cls is not None:
            return next((name for name in self.methods if _unbound(getattr(self.cls, name)) is own), None)
        # The driver may have another copy of the class, or none: its methods are known by where they were defined.
        full_name = full_function_name(own)
        return next((name for name in self.methods if full_name and self.full_names[name] == full_name), None)

    def _in_place_of_method(self, function: Any) -> Method:
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"call takes a method's name, a method of the class, or a function f(worker, ...), got {function!r}"
            )
        shared = self.target.partition(".")[0] if isinstance(self.target, str) else None
        signature = signature_without_worker(function)
        return Method(function_name(function), function_kind(function), signature, pickled_function(function, shared))


def full_name(worker: Any) -> str:
    """`package.module.Class` of a class, a `@ray.remote` class, or of what names itself so.

    Raises:
        TypeError: neither a class nor a name.
        ValueError: a name that cannot be one.
    """
    if isinstance(worker, str):
        parts = worker.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise ValueError(f"a worker class is named as 'package.module.Class', got {worker!r}")
        return worker
    cls = getattr(worker, "__ray_actor_class__", worker)
    if not isinstance(cls, type):
        raise TypeError(f"a worker must be a class or its full name, got {worker!r}")
    return f"{cls.__module__}.{cls.__qualname__}"


def shipped(worker: Any) -> str | bytes:
    """What workers load a class from: its name if that leads back to it, else the class itself, by value."""
    name = full_name(worker)
    if isinstance(worker, str):
        return name
    cls = getattr(worker, "__ray_actor_class__", worker)
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if cls.__module__ != "__main__" and (found is worker or found is cls):
        return name
    # From __main__, a notebook or a function: workers cannot import it.
    pickled: bytes = ray.cloudpickle.dumps(worker)
    return pickled


def describe_class(
    worker: Any,
    *,
    asks: Sequence[dict[str, Any]],
    node_id: str,
    runtime_env: Mapping[str, Any] | None,
    timeout_s: float,
    concurrent: bool = False,
) -> WorkerClass:
    """Look at a class: here if it is an object, by one short task if it is a name.

    Args:
        worker: the class or its full name.
        asks: keyword arguments for its `configure_worker`, a dict per worker.
        node_id: where the task runs.
        runtime_env: what the workers will run in.
        timeout_s: how long the task may take.
        concurrent: whether its async methods are to overlap.

    Raises:
        WorkerStartError: the class cannot be imported or configured where it would run.
        TypeError, ValueError: it is not a class, or uses what workers of a group cannot have.
    """
    target = shipped(worker)
    if isinstance(worker, str):
        task = ray.remote(describe).options(
            num_cpus=0,
            max_retries=0,
            runtime_env=dict(runtime_env or {}) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        ref = task.remote(target, list(asks))
        try:
            told = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            ray.cancel(ref, force=True)
            raise WorkerStartError(
                f"importing {worker!r} on node {node_id[:8]} took more than {timeout_s:g} s (start_timeout_s)"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise WorkerStartError(
                f"{worker!r} cannot be used as a worker on node {node_id[:8]}: {error.cause}. Install it in the "
                "workers' Python, or give the group the python that has it.",
                remote_traceback=remote_traceback(error),
            ) from error
        except ray.exceptions.RayError as error:
            raise WorkerStartError(f"looking at {worker!r} on node {node_id[:8]} failed: {error}") from error
    else:
        told = describe(worker, list(asks))
    if told["refused"]:
        raise ValueError(
            f"{told['name']}: {'; '.join(told['refused'])}: a worker of a group cannot have this option of a method. "
            "Remove the option, or create this actor by hand."
        )
    methods = {
        n: Method(n, kind, _signature(p), backpressure=told["backpressure"].get(n))
        for n, (kind, p) in told["methods"].items()
    }
    return WorkerClass(
        target,
        told["name"],
        methods,
        told["options"],
        told["configurations"],
        concurrent,
        cls=None if isinstance(worker, str) else getattr(worker, "__ray_actor_class__", worker),
        full_names=told["full_names"],
    )


def _unbound(function: Any) -> Any:
    """Return the function of a class method that was looked up on its class."""
    return function.__func__ if isinstance(getattr(function, "__self__", None), type) else function


def _without_ray(function: Any) -> Any:
    """Return the user's own method for one that was looked up on a `@ray.remote` class, which wraps its methods."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, ActorClass):
        return function
    cls = undecorated(owner)
    for name in dir(cls):
        if getattr(getattr(owner, name, None), "__func__", None) is function.__func__:
            return getattr(cls, name)
    return function


class _Default:
    """Stands for a parameter's default, which stays with the workers."""

    def __repr__(self) -> str:
        return "..."


def _signature(parameters: Sequence[tuple[str, int, bool]] | None) -> inspect.Signature | None:
    if parameters is None:
        return None
    kinds = [
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ]
    return inspect.Signature(
        [
            inspect.Parameter(name, kinds[kind], default=inspect.Parameter.empty if required else _Default())
            for name, kind, required in parameters
        ]
    )


def function_name(function: Callable[..., Any]) -> str:
    """Return what errors and logs call a function.

    >>> function_name(os.path.join), function_name(functools.partial(max, 1))
    ('join', 'max')
    """
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is not None and name.endswith("<lambda>"):
        name = f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return name


def full_function_name(function: Any) -> str:
    """Return `module.Class.method` of a function; "" if it cannot be found by its name."""
    name = getattr(function, "__qualname__", "")
    return "" if not name or "<" in name else f"{getattr(function, '__module__', '')}.{name}"


def function_kind(function: Callable[..., Any]) -> str:
    """Return the kind of a function, as of a method: plain, generator, async or async_generator."""
    known = inspect.isroutine(function) or isinstance(function, functools.partial)
    return kind_of(function if known else type(function).__call__)


def signature_without_worker(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the parameters that a caller gives: all but the first; None when Python cannot tell.

    Raises:
        TypeError: the function has no positional parameter for the worker's instance.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    first = parameters[0].kind if parameters else None
    if first is inspect.Parameter.VAR_POSITIONAL:
        return signature
    if first not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise TypeError(
            f"{function_name(function)}{signature} has no positional parameter. A function that is called in place of "
            "a method gets the worker's instance as its first argument: f(worker, ...)."
        )
    return signature.replace(parameters=parameters[1:])


def pickled_function(function: Callable[..., Any], shared: str | None) -> bytes:
    """Pickle a function so that workers without its module can run it.

    Functions and classes of modules that are not installed travel by value. Those of the standard library, of
    installed packages, and of the package that the workers import their class from travel by name: there the function
    must see the same module as the workers do.

    Args:
        function: what to pickle.
        shared: the top-level package of the class, if the workers import it by name.

    Raises:
        TypeError: it cannot be pickled; says which function, and what it refers to that cannot be.
    """

    def by_value(module: str) -> bool:
        return module.partition(".")[0] != shared and not is_installed(module)

    try:
        return dumps_by_value(function, by_value)
    except Exception as error:
        reason = _reason(function, by_value, error)
        raise TypeError(
            f"the function {function_name(function)!r} cannot be sent to the workers: {reason}. Pass what it needs as "
            "arguments, or make it inside the function."
        ) from error


def is_installed(module: str) -> bool:
    """Return whether a module is part of Python or of an installed package, rather than of the user's own code.

    >>> is_installed("json.decoder"), is_installed("ray.actor")
    (True, True)
    """
    package = module.partition(".")[0]
    # `current_worker` and the like are about the process that they run in, however Fairlead is installed here.
    if package in sys.stdlib_module_names or package.startswith("fairlead_"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    # Without a file it is built into an extension, or was made by hand: cloudpickle knows best.
    return file is None or os.path.abspath(file).startswith(_installation_folders())


@functools.cache
def _installation_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update([*site.getsitepackages(), site.getusersitepackages()])
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


def _reason(function: Callable[..., Any], by_value: Callable[[str], bool], error: Exception) -> str:
    """Return which variable of a function cannot be pickled and why, or else the error itself."""
    while isinstance(function, functools.partial):
        function = function.func
    used = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    for name, value in {**used.nonlocals, **used.globals}.items() if used else ():
        try:
            dumps_by_value(value, by_value)
        except Exception as own:  # noqa: BLE001  whatever an object's own reduction raises
            return f"it uses {name!r}, a {type(value).__qualname__}: {_innermost(own)}"
    return _innermost(error)


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
