# SPDX-License-Identifier: Apache-2.0
"""The worker's side: the class each worker actor runs, and how a user's class is looked at.

Shipped by value, so that a worker's Python needs nothing but Ray: this module imports the standard library and Ray
only, and nothing of its siblings. What it publishes about the worker is plain data in
`sys.modules["_fairlead_worker"]`.
"""

import asyncio
import functools
import importlib
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import ray

__all__ = ["WorkerHost", "describe", "host_class", "load", "python_facts", "start_tick"]


def load(target: Any) -> type:
    """The user's class, from its full name, its pickled bytes or itself; `@ray.remote` is taken off."""
    return _undecorated(_found(target))


def _found(target: Any) -> Any:
    if isinstance(target, bytes):
        return ray.cloudpickle.loads(target)
    return _import(target) if isinstance(target, str) else target


def _undecorated(found: Any) -> type:
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


def describe(target: Any, asks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What the driver has to know of a class that it may not be able to import, as plain data.

    `asks` are keyword arguments for the class's `configure_worker`, one dict per worker. Returned are the class's
    short name, its public methods (kind and parameters), the default options of `@ray.remote` or of a
    `_default_options` attribute, what it uses that workers of a group cannot have, and the configurations.
    """
    decorated = _found(target)
    cls = _undecorated(decorated)
    methods: dict[str, tuple[str, Any]] = {}
    refused: list[str] = []
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if name.startswith("_") or not inspect.isroutine(function):
            continue
        methods[name] = (
            _kind(function),
            _parameters(getattr(cls, name), bound=isinstance(member, (staticmethod, classmethod))),
        )
        refused += [
            f"{name} uses @ray.method({option}=...)"
            for option in ("num_returns", "concurrency_group")
            if getattr(function, f"__ray_{option}__", None) is not None
        ]
    options = dict(getattr(decorated, "_default_options", None) or {})
    if options.get("concurrency_groups"):
        refused.append("@ray.remote(concurrency_groups=...)")
    configure = getattr(cls, "configure_worker", None)
    return {
        "name": cls.__name__,
        "methods": methods,
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


def _kind(function: Any) -> str:
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
    return [(p.name, int(p.kind), p.default is p.empty) for p in parameters[0 if bound else 1 :]]


def python_facts(python: str | None = None) -> tuple[str, str | None]:
    """(version of Python, version of Ray) of an interpreter on this machine; of this one when None."""
    if python is None:
        return ".".join(map(str, sys.version_info[:2])), ray.__version__
    code = (
        "import sys, importlib.metadata as m\n"
        "print('.'.join(map(str, sys.version_info[:2])))\n"
        "try: print(m.version('ray'))\n"
        "except m.PackageNotFoundError: print('')"
    )
    try:
        # Without the parent's PYTHON* variables: they are not what the worker will run with.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}", None
    if done.returncode:
        return f"exit status {done.returncode}: {done.stderr[-2000:]}", None
    version, ray_version = done.stdout.split("\n")[:2]
    return version, ray_version


def start_tick(pid: int) -> int:
    """When a process started, in clock ticks since the machine did: with its pid, who it is. -1 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    # A zombie (state Z) holds nothing any more; fields[0] is the third of the file, the start time its 22nd.
    return -1 if fields[0] == b"Z" else int(fields[19])


class WorkerHost:
    """Holds one instance of the user's class. `host_class` adds a method for each public method of it."""

    _fairlead_instance: Any = None
    _fairlead_own_loop: asyncio.AbstractEventLoop | None = None

    def _fairlead_start(
        self, facts: dict[str, Any], target: list[Any], args: list[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Make the worker: environment first, then the class, then the instance.

        Not `__init__`: an error there kills the actor and reaches the driver as text, here it keeps its type; and
        arguments that Ray would unpickle before `__init__` are fetched here, after the environment is set.
        """
        os.environ.update(facts["env"])
        sys.path.extend(path for path in facts["path"] if path not in sys.path)
        published = types.ModuleType("_fairlead_worker")
        published.__dict__["facts"] = facts
        sys.modules["_fairlead_worker"] = published
        (target,), _ = _fetched(target, {})
        cls = load(target)
        args, kwargs = _fetched(args, kwargs)
        self._fairlead_instance = cls(*args, **kwargs)
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

    def _fairlead_cleanup(self, method: str) -> None:
        getattr(self._fairlead_instance, method)()

    def _fairlead_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of a worker whose async methods run one at a time."""
        if self._fairlead_own_loop is None:
            self._fairlead_own_loop = asyncio.new_event_loop()
        return self._fairlead_own_loop


def _fetched(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The constructor's arguments with every ObjectRef replaced by its value, all fetched at once."""
    refs = [value for value in (*args, *kwargs.values()) if isinstance(value, ray.ObjectRef)]
    values = dict(zip(refs, ray.get(refs), strict=True))
    return (
        [values[v] if isinstance(v, ray.ObjectRef) else v for v in args],
        {k: values[v] if isinstance(v, ray.ObjectRef) else v for k, v in kwargs.items()},
    )


def host_class(name: str, kinds: Mapping[str, str]) -> type:
    """A subclass of WorkerHost with one delegating method for each method of the user's class.

    A method per method, rather than one generic call: Ray streams only from real generator methods, and arguments
    inside a container are serialised as objects of their own, which makes every call slower.
    """
    return type(name, (WorkerHost,), {method: _delegate(method, kind) for method, kind in kinds.items()})


def _delegate(method: str, kind: str) -> Any:
    if kind == "plain":

        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._fairlead_instance, method)(*args, **kwargs)

    elif kind == "generator":

        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Not `yield from`: Ray sends into the generators it runs, which iterators of other kinds do not take.
            for item in getattr(self._fairlead_instance, method)(*args, **kwargs):  # noqa: UP028
                yield item

    elif kind == "async":
        # A plain method: one `async def` on the class would make Ray run all of them at the same time.
        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._fairlead_loop().run_until_complete(getattr(self._fairlead_instance, method)(*args, **kwargs))

    else:

        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            loop, items = self._fairlead_loop(), getattr(self._fairlead_instance, method)(*args, **kwargs)
            while True:
                try:
                    item = loop.run_until_complete(anext(items))
                except StopAsyncIteration:
                    return
                yield item

    delegate.__name__ = method
    delegate.__qualname__ = f"{WorkerHost.__name__}.{method}"
    return delegate
