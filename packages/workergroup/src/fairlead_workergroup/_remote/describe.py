# SPDX-License-Identifier: Apache-2.0
"""Load a user's class from its name or its pickled bytes, and describe it where workers will run."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import ray


def describe(target: Any, asks: Sequence[dict[str, Any]] = (), more: Sequence[str] = ()) -> dict[str, Any]:
    """Describe a class as plain data: its configuration for each of `asks`, its public methods, and those of `more`."""
    decorated = resolve(target)
    cls = undecorate(decorated)
    methods: dict[str, tuple[str, Any]] = {}
    full_names: dict[str, str] = {}
    refused: list[str] = []
    is_async = False  # as Ray decides whether methods overlap
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        bound = isinstance(member, (staticmethod, classmethod))
        function = member.__func__ if bound else member
        if not inspect.isroutine(function):
            continue
        is_async = is_async or "async" in _kind_of_code(function)
        if name.startswith("_") and name not in more:
            continue
        kind = kind_of(function)
        methods[name] = kind, _signature(getattr(cls, name), bound=bound)
        full_names[name] = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        # Ray stores the options of `@ray.method` as attributes of the function.
        given = [(key, value) for key, value in getattr(function, "__dict__", {}).items() if key.startswith("__ray_")]
        refused += [f"{name} uses @ray.method({key[6:-2]}={value!r})" for key, value in given]
    options = dict(getattr(decorated, "_default_options", None) or {})
    configure = getattr(cls, "configure_worker", None)
    return {
        "name": cls.__name__,
        "methods": methods,
        "full_names": full_names,
        "options": options,
        "refused": refused,
        "is_async": is_async,
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


def kind_of(function: Any) -> str:
    """Return the kind of a method: plain, generator, async or async_generator."""
    kind = _kind_of_code(function)
    # The function of a decorator, such as a timer, is plain, but it returns what the method returns.
    return kind if kind != "plain" else _kind_of_code(inspect.unwrap(function))


def _kind_of_code(function: Any) -> str:
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.iscoroutinefunction(function):
        return "async"
    return "generator" if inspect.isgeneratorfunction(function) else "plain"


def _signature(function: Any, bound: bool) -> inspect.Signature | None:
    """Return the signature without `self` of the function that is called, as plain data; None if it is unknown."""
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None
    if not bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]  # self; the function of a decorator often has it among *args
    plain = [p.replace(annotation=p.empty, default=p.default if p.default is p.empty else ...) for p in parameters]
    return inspect.Signature(plain)


def load(target: Any) -> type:
    """Return the user's class, given by its full name, its pickled bytes or itself, without `@ray.remote`."""
    return undecorate(resolve(target))


def resolve(target: Any) -> Any:
    """Return the object that a full name or pickled bytes stand for, or the object itself."""
    if isinstance(target, bytes):
        return ray.cloudpickle.loads(target)
    return _import(target) if isinstance(target, str) else target


def undecorate(worker: Any) -> type:
    """Return a class without `@ray.remote`."""
    cls = getattr(worker, "__ray_actor_class__", worker)
    if not isinstance(cls, type):
        raise TypeError(f"a worker must be a class or its full name, got {worker!r}")
    return cls


def _import(full_name: str) -> Any:
    """Import `package.module.Outer.Class`; unlike `pkgutil.resolve_name`, show an ImportError that a module raises."""
    parts = full_name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # A module of the name itself is missing, so the rest are attributes; other modules are a real error.
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise
            missing = error
            continue
        try:
            return functools.reduce(getattr, parts[split:], module)
        except AttributeError as error:
            near = difflib.get_close_matches(parts[split], dir(module), 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ImportError(f"module {module_name!r} has no {'.'.join(parts[split:])!r}{hint}") from error
    raise missing
