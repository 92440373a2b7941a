# SPDX-License-Identifier: Apache-2.0
"""The user's function, looked at before anything is reserved, and made ready to travel."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction

from .._accelerators.config import AcceleratorConfigType
from .._accelerators.slices import SliceInfo
from .environment import split_loader

__all__ = ["Class", "Function", "Work", "own_options", "work_of"]

# What a user's @ray.remote may not say here, because the pool says it.
_OURS = ("num_returns", "scheduling_strategy", "placement_group", "label_selector")
# Taken from a user's @ray.remote as they are.
_KEPT = ("memory", "name", "enable_task_events", "max_concurrency", "max_pending_calls", "_labels")


class Remote(Protocol):
    """What `@ray.remote` makes of a function or a class."""

    @property
    def remote(self) -> Callable[..., Any]:
        """What starts it, as a task or an actor."""


class RemoteClass(Remote, Protocol):
    """What `@ray.remote` makes of a class; to a type checker it can be called, what it makes of a function cannot."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a TypeError."""


Function = Callable[..., Any] | Remote
"""What can be run: a function, plain or `@ray.remote`."""
Class = type[Any] | RemoteClass
"""What can have instances: a class, plain or `@ray.remote`."""


@dataclass(frozen=True)
class Work:
    """What to run on each host.

    Attributes:
        name: of the function.
        function: the function itself.
        options: of its `@ray.remote`, if it has one.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def put(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Store it with its arguments, once for all hosts and all attempts.

        Raises:
            TypeError: something of it cannot be pickled.
        """
        return ray.put((self.function, args, dict(kwargs)))

    def remote_options(self, config: AcceleratorConfigType, one: SliceInfo) -> dict[str, Any]:
        """What its task asks Ray for on a host of a slice.

        Raises:
            ValueError: more than is reserved there.
        """
        asked = config.request(one)
        reserved = config.bundle(one, worker=-1)
        mine = {"CPU": self.options.get("num_cpus"), "GPU": self.options.get("num_gpus")}
        asked |= {name: float(amount) for name, amount in mine.items() if amount is not None}
        asked |= self.options.get("resources") or {}
        for name, amount in {**asked, "memory": self.options.get("memory") or 0.0}.items():
            if amount > reserved.get(name, 0.0):
                raise ValueError(
                    f"{self.name} asks for {amount:g} {name} by its @ray.remote, but {reserved.get(name, 0.0):g} are "
                    "reserved on each host. Reserve more (cpu_count, resources), or ask for less."
                )
        options = {name: self.options[name] for name in _KEPT if self.options.get(name) is not None}
        options["num_cpus"], gpus = asked.pop("CPU"), asked.pop("GPU", 0.0)
        options |= {"num_gpus": gpus} if gpus else {}
        return {**options, "resources": asked}

    def runtime_env(self, config: AcceleratorConfigType) -> dict[str, Any]:
        """What its process needs from before it starts; empty if any process will do."""
        own = dict(self.options.get("runtime_env") or {})
        variables = split_loader(own.pop("env_vars", None) or {})[1] | split_loader(config.env_vars)[1]
        return {**own, **config.runtime_env, **({"env_vars": variables} if variables else {})}

    @property
    def env_vars(self) -> dict[str, str]:
        """Variables of its `@ray.remote`; those of the configuration override them."""
        return split_loader((self.options.get("runtime_env") or {}).get("env_vars") or {})[0]


def work_of(function: Any, *, of_class: bool = False) -> Work:
    """Look at a function, plain or `@ray.remote`, or at a class.

    Raises:
        TypeError: what cannot be called, or returns what cannot travel.
        ValueError: options of `@ray.remote` that cannot be kept.
    """
    plain, options = function, {}
    if isinstance(function, (RemoteFunction, ActorClass)):
        plain = function._function if isinstance(function, RemoteFunction) else function.__ray_actor_class__
        options = dict(function._default_options)
    if of_class != isinstance(plain, type) or not callable(plain):
        raise TypeError(f"a {'class' if of_class else 'function'} is wanted, plain or @ray.remote, got {function!r}")
    innermost = plain
    while isinstance(innermost, functools.partial):
        innermost = innermost.func
    name = str(getattr(plain, "__name__", "") or getattr(innermost, "__name__", type(innermost).__name__))
    for kind, check in (
        ("a coroutine", inspect.iscoroutinefunction),
        ("a generator", inspect.isgeneratorfunction),
        ("a generator", inspect.isasyncgenfunction),
    ):
        if check(innermost):
            raise TypeError(f"{name} returns {kind}, which cannot be sent back: return a value")
    # A task's name may be that of others, an actor's may not.
    ours = (*_OURS, "name") if of_class else _OURS
    refused = [one for one in ours if options.get(one) not in (None, 1)]
    if refused:
        raise ValueError(f"{name} sets {', '.join(refused)} in @ray.remote, which the pool decides: remove it")
    return Work(name, plain, options)


def own_options(function: Any, options: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Our options among keyword arguments, and into `kwargs` those that are the function's.

    A keyword that the function has a parameter for is the function's. Then the option is given on the configuration.

    Args:
        function: the user's.
        options: what came under the names of our options; those that are None were not given.
        kwargs: the function's keyword arguments; added to.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        named = set(inspect.signature(getattr(function, "_function", function)).parameters)
    except (TypeError, ValueError):
        named = set()
    theirs = {name: given.pop(name) for name in list(given) if name in named}
    kwargs.update(theirs)
    return given
