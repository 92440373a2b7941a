# SPDX-License-Identifier: Apache-2.0
"""The user's function or class: checked before anything is reserved, and stored for the hosts."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from ._config import AcceleratorConfigType
from ._ray_private import unwrap_remote
from ._slices import SliceInfo

# The pool sets these, so a user's @ray.remote may not.
_REFUSED = ("num_returns", "scheduling_strategy", "placement_group", "label_selector")
# These are taken over from a user's @ray.remote without a change.
_KEPT = ("name", "enable_task_events", "max_concurrency", "max_pending_calls", "_labels")


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
    options: Mapping[str, Any] = field(default_factory=dict)

    def put(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return ray.put((self.function, args, dict(kwargs)))

    def remote_options(self, config: AcceleratorConfigType, place: SliceInfo | None) -> dict[str, Any]:
        """Return the Ray options of its task on a host; ValueError if it requests more than is reserved there."""
        reserved = config.request(place)
        own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        asked = {name: float(self.options[key]) for name, key in own.items() if self.options.get(key) is not None}
        asked = {**reserved, **asked, **(self.options.get("resources") or {})}
        for name, amount in asked.items():
            if amount > reserved.get(name, 0.0):
                raise ValueError(
                    f"{self.name} requests {amount:g} {name} in its @ray.remote, but {reserved.get(name, 0.0):g} are "
                    "reserved on each host. Reserve more (cpu_count), or request less."
                )
        options = {name: self.options[name] for name in _KEPT if self.options.get(name) is not None}
        options |= {"num_cpus": asked.pop("CPU"), "num_gpus": asked.pop("GPU", 0.0)}
        return {**options, "resources": {name: amount for name, amount in asked.items() if amount}}

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
