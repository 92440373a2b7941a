# SPDX-License-Identifier: Apache-2.0
"""Loading a user's class from its name or its pickled bytes, and describing it where workers will run."""

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import ray

__all__ = ["describe", "found", "kind_of", "load", "undecorated"]


def describe(target: Any, asks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What the driver has to know of a class that it may not be able to import, as plain data.

    `asks` are keyword arguments for the class's `configure_worker`, one dict per worker. Returned are the class's
    short name, its public methods (kind and parameters) and the full names of their functions, how many items a
    generator method may be ahead of its reader, the default options of `@ray.remote` or of a `_default_options`
    attribute, what it uses that workers of a group cannot have, and the configurations.
    """
    decorated = found(target)
    cls = undecorated(decorated)
    methods: dict[str, tuple[str, Any]] = {}
    full_names: dict[str, str] = {}
    backpressure: dict[str, int] = {}
    refused: list[str] = []
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if name.startswith("_") or not inspect.isroutine(function):
            continue
        methods[name] = (
            kind_of(function),
            _parameters(getattr(cls, name), bound=isinstance(member, (staticmethod, classmethod))),
        )
        full_names[name] = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        kind = methods[name][0]
        options = _method_options(function, kind)
        limit = options.get(_BACKPRESSURE)
        if isinstance(limit, int) and limit > 0 and kind in ("generator", "async_generator"):
            backpressure[name] = options.pop(_BACKPRESSURE)
        refused += [f"{name} uses @ray.method({option}={value!r})" for option, value in options.items()]
    options = dict(getattr(decorated, "_default_options", None) or {})
    configure = getattr(cls, "configure_worker", None)
    return {
        "name": cls.__name__,
        "methods": methods,
        "full_names": full_names,
        "backpressure": backpressure,
        "options": options,
        "refused": refused,
        "configurations": None if configure is None else [_configure(configure, ask) for ask in asks],
    }


def _configure(configure: Any, ask: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    accepted = inspect.signature(configure).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    answer = configure(**{name: value for name, value in ask.items() if everything or name in accepted})
    if not isinstance(answer, tuple) or len(answer) not in (3, 4):
        raise TypeError(
            "configure_worker must return (resources, env_vars, init_kwargs) or these and runtime_env overrides, "
            f"got {answer!r}"
        )
    return tuple(dict(part or {}) for part in answer)


_BACKPRESSURE = "_generator_backpressure_num_objects"
# Options of @ray.method with the values that change nothing. Ray keeps an option as an attribute of the function,
# without the underscore with which some of their names begin.
_NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "concurrency_group": (),
    "enable_task_events": (True,),
    "_generator_backpressure_num_objects": (-1,),
    "max_task_retries": (0,),
    "num_returns": (),
    "_num_objects_per_yield": (1,),
    "retry_exceptions": (False,),
    "tensor_transport": (),
}


def _method_options(function: Any, kind: str) -> dict[str, Any]:
    """Return the options that `@ray.method` gave a method, without those that change nothing."""
    no_change = {**_NO_CHANGE, "num_returns": ("streaming",) if "generator" in kind else (1,)}
    given = {option: getattr(function, f"__ray_{option.lstrip('_')}__", None) for option in no_change}
    return {option: value for option, value in given.items() if value is not None and value not in no_change[option]}


def kind_of(function: Any) -> str:
    """Return the kind of a method: plain, generator, async or async_generator."""
    kind = _kind_of_code(function)
    # A decorator such as a timer returns what the method returns, and the kind of its own function is "plain".
    return kind if kind != "plain" else _kind_of_code(inspect.unwrap(function))


def _kind_of_code(function: Any) -> str:
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.iscoroutinefunction(function):
        return "async"
    return "generator" if inspect.isgeneratorfunction(function) else "plain"


def _parameters(function: Any, bound: bool) -> Any:
    """(name, kind, required) of each parameter but `self`; None when Python cannot tell.

    Of the function that is really called: what a decorator wraps may take other parameters than the decorator.
    """
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None
    if not bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]  # self; what a decorator makes often has it among *args
    return [(p.name, int(p.kind), p.default is p.empty) for p in parameters]


def load(target: Any) -> type:
    """The user's class, from its full name, its pickled bytes or itself; `@ray.remote` is taken off."""
    return undecorated(found(target))


def found(target: Any) -> Any:
    """What a full name or pickled bytes stand for, or the object itself."""
    if isinstance(target, bytes):
        return ray.cloudpickle.loads(target)
    return _import(target) if isinstance(target, str) else target


def undecorated(found: Any) -> type:
    """The class itself, without `@ray.remote`."""
    cls = getattr(found, "__ray_actor_class__", found)
    if not isinstance(cls, type):
        raise TypeError(f"a worker must be a class, got {found!r}")
    return cls


def _import(full_name: str) -> Any:
    """`package.module.Outer.Class`: the longest prefix that is a module, then attributes."""
    parts = full_name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # Only "there is no such module" means that the name is a class; what the module misses is its own error.
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise
            missing = error
            continue
        try:
            return functools.reduce(getattr, parts[split:], module)
        except AttributeError as error:
            raise ImportError(f"module {module_name!r} has no {'.'.join(parts[split:])!r}") from error
    raise missing
