# SPDX-License-Identifier: Apache-2.0
"""The user's function or class: checked before anything is reserved, and stored for the hosts."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ._config import AcceleratorConfigType
from ._ray_private import unwrap_remote

# The pool sets these, so a user's @ray.remote may not.
_REFUSED = ("num_returns", "scheduling_strategy", "placement_group", "label_selector")
# These are taken over from a user's @ray.remote without a change.
_REQUESTS = ("num_cpus", "num_gpus", "memory")
_KEPT = (*_REQUESTS, "name", "enable_task_events", "max_concurrency", "max_pending_calls", "_labels")


class Remote(Protocol):
    """A function or a class under `@ray.remote`."""

    @property
    def remote(self) -> Callable[..., Any]: ...


class RemoteClass(Remote, Protocol):
    """A class under `@ray.remote`. For a type checker it can be called, and a function under `@ray.remote` cannot."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Function = Callable[..., Any] | Remote
Class = type[Any] | RemoteClass


@dataclass(frozen=True)
class Work:
    """A function or a class to run on each host, and the options of its `@ray.remote`, if it has one."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    payload: Any = None  # the reference of what the hosts get: the function and its arguments

    def remote_options(self, reserved: Mapping[str, float]) -> dict[str, Any]:
        """Return the Ray options of its task on a host, which requests all that is reserved there unless it says so."""
        resources = {**reserved, **(self.options.get("resources") or {})}
        options = {"num_cpus": resources.pop("CPU"), "num_gpus": resources.pop("GPU", 0.0), "resources": resources}
        return options | {name: self.options[name] for name in _KEPT if self.options.get(name) is not None}

    def runtime_env(self, config: AcceleratorConfigType) -> dict[str, Any]:
        """Return the runtime_env of its `@ray.remote` with that of the configuration, which overrides it."""
        own = self.options.get("runtime_env") or {}
        variables = {**(own.get("env_vars") or {}), **config.env_vars}
        return {**own, **config.execution_env, "env_vars": variables}


def inspect_work(function: Any, *, of_class: bool = False) -> Work:
    """Check a function or a class, plain or `@ray.remote`, and return what is known about it."""
    plain, options = unwrap_remote(function)
    if of_class != isinstance(plain, type) or not callable(plain):
        raise TypeError(f"Expected a {'class' if of_class else 'function'}, plain or @ray.remote, got {function!r}.")
    innermost = plain
    while isinstance(innermost, functools.partial):
        innermost = innermost.func
    name = str(getattr(plain, "__name__", "") or getattr(innermost, "__name__", type(innermost).__name__))
    yields = inspect.isgeneratorfunction(innermost) or inspect.isasyncgenfunction(innermost)
    if yields or inspect.iscoroutinefunction(innermost):
        kind = "a generator" if yields else "a coroutine"
        raise TypeError(f"{name} returns {kind}, which cannot be sent back. Return a value.")
    # Tasks may share a name, actors may not.
    refused = [key for key in (*_REFUSED, *["name"] * of_class) if options.get(key) not in (None, 1)]
    if refused:
        raise ValueError(f"{name} sets {', '.join(refused)} in @ray.remote, which the pool sets. Remove it.")
    return Work(name, plain, options)


def take_options(function: Any, options: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options whose names are no parameters of the function; add the others to `kwargs`."""
    try:
        parameters = set(inspect.signature(unwrap_remote(function)[0]).parameters)
    except (TypeError, ValueError):
        parameters = set()
    kwargs |= {name: value for name, value in options.items() if name in parameters}
    return {name: value for name, value in options.items() if name not in parameters}


def check_call(name: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a TypeError if a function cannot take these arguments. One without a readable signature passes."""
    try:
        # The signature of its own: that of a wrapped function need not be what the wrapper accepts.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name} cannot take the arguments of this call: {error}. Nothing was started.") from None


def check_method(cls: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a TypeError if a method of a class cannot take these arguments, as `check_call` does."""
    defined = inspect.getattr_static(cls, method, None)
    if inspect.isfunction(defined):
        check_call(f"{cls.__name__}.{method}", defined, (None, *args), kwargs)  # None stands for `self`.
    elif isinstance(defined, staticmethod | classmethod):
        check_call(f"{cls.__name__}.{method}", getattr(cls, method), args, kwargs)
