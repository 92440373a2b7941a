# SPDX-License-Identifier: Apache-2.0
"""The user's class as the driver knows it, even if it cannot import it, and functions in place of its methods."""

import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import ray
from ray import ObjectRef
from ray.actor import ActorClass
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from .._arguments import Arguments, find_unpicklable
from .._observe.query import read_placement_group
from .._observe.remote_errors import explain_missing_module, remote_traceback
from .._remote.describe import describe, kind_of, undecorate
from .._remote.host import host_class
from ..exceptions import WorkerStartError
from .environment import check_concurrency, recursive_merge_options, worker_environment

START_S = 600.0

ClassLike: TypeAlias = str | type[Any] | ActorClass[Any]


@dataclass(frozen=True)
class Method:
    """A public method of the user's class, or a function in place of one."""

    name: str
    kind: str  # plain, generator, async or async_generator
    signature: inspect.Signature | None  # None if Python cannot tell
    function: Any = None  # pickled, or a reference to that; None for a method

    @cached_property
    def result(self) -> str:
        """The result of a call: "value", or "items" if it yields them."""
        return "items" if self.kind in ("generator", "async_generator") else "value"

    def parameter(self, number: int) -> str | int:
        """Return the name of the parameter that takes a positional argument, or its number if it has no name."""
        parameters = [] if self.signature is None else list(self.signature.parameters.values())
        named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        return named[number] if number < len(named) else number

    def check(self, count: int, names: Iterable[str]) -> None:
        """Raise the `TypeError` that a call would raise, for a number of positional arguments and others by name."""
        try:
            if self.signature is not None:
                self.signature.bind(*range(count), **dict.fromkeys(names))
        except TypeError as error:
            parameters = str(self.signature).replace("Ellipsis", "...")  # stands for a default
            is_timeout = "unexpected" in str(error) and "timeout" in str(error)
            hint = ". Did you mean timeout, the option of call?" if is_timeout else ""
            raise TypeError(f"{self.name}{parameters}: {error}{hint}") from None


@dataclass(frozen=True)
class WorkerClass:
    """A user's class as described by the process that can import it; `cls` is None if only its name was given."""

    target: str | bytes  # the full name or the pickled bytes from which a worker loads it
    name: str
    methods: Mapping[str, Method]
    options: Mapping[str, Any] = field(default_factory=dict)
    configurations: Sequence[tuple[dict[str, Any], ...]] | None = None  # of `configure_worker`, for each worker
    concurrent: bool = False  # whether its async methods overlap
    cls: type | None = None
    full_names: Mapping[str, str] = field(default_factory=dict)  # `module.Class.method` of each method's function
    plain: Mapping[str, Any] = field(default_factory=dict)  # what a process without the class needs to call its methods

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "WorkerClass":
        """Return the class that has been described as `plain` data."""
        return cls(
            data["target"],
            data["class"],
            {method[0]: Method(*method) for method in data["methods"]},
            concurrent=data["concurrent"],
            full_names=data["full_names"],
            plain=data,
        )

    def configuration(self, rank: int) -> tuple[dict[str, Any], ...]:
        """Return (resources, env_vars, init_kwargs, runtime_env overrides) for a worker, which are empty by default."""
        configuration = () if self.configurations is None else self.configurations[rank]
        return (*configuration, {}, {}, {}, {})[:4]

    @cached_property
    def actor_class(self) -> Any:
        """The generated class that hosts it, as a Ray actor class."""
        kinds = {method.name: method.kind for method in self.methods.values()}
        return ray.remote(host_class(self.name, kinds, concurrent=self.concurrent))

    def method(self, method: "str | Callable[..., Any] | Method") -> Method:
        """Return the method for its name, for a method of the class, or for any other function."""
        if isinstance(method, Method):
            return method
        if not isinstance(method, str):
            function = _without_ray(method)
            name = self._name_of(function)
            return self._replacement(function) if name is None else self.methods[name]
        if method not in self.methods:
            text = f"{self.name} has no public method {method!r}; it has {sorted(self.methods)}"
            if method.startswith("_") and (self.cls is None or hasattr(self.cls, method)):
                text += f". To call it too, start the group with RayWorkerBuilder({self.name}).with_methods({method!r})"
            raise AttributeError(text)
        return self.methods[method]

    def _name_of(self, function: Any) -> str | None:
        """Return the method name of a function, which may differ from its own name; None if it is not a method."""
        own = _unbound(function)
        if inspect.ismethod(own):  # of an object in the driver
            return None
        if self.cls is not None:
            return next((name for name in self.methods if _unbound(getattr(self.cls, name)) is own), None)
        # The driver may have another copy of the class, or none, so compare where the methods are defined.
        full_name = f"{getattr(own, '__module__', '')}.{getattr(own, '__qualname__', '<none>')}"
        is_named = "<" not in full_name
        return next((name for name in self.methods if is_named and self.full_names[name] == full_name), None)

    def _replacement(self, function: Any) -> Method:
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"call takes a method's name, a method of the class, or a function f(worker, ...), got {function!r}"
            )
        is_function = inspect.isroutine(function) or isinstance(function, functools.partial)
        name, kind = function_name(function), kind_of(function if is_function else type(function).__call__)
        signature = signature_without_worker(function)
        if "generator" in kind:
            raise TypeError(
                f"{name!r} is a generator function, and only methods stream: make it a generator method of the class, "
                "or return a list"
            )
        return Method(name, kind, signature, pickle_function(function))


def full_name(worker: Any) -> str:
    """Return `package.module.Class` of a class or a `@ray.remote` class, or the name itself if one is given."""
    if isinstance(worker, str):
        parts = worker.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise ValueError(f"the name of a worker class must be 'package.module.Class', got {worker!r}")
        return worker
    cls = undecorate(worker)
    return f"{cls.__module__}.{cls.__qualname__}"


def make_target(worker: Any) -> str | bytes:
    """Return the name of a class if workers can import it by that name, else its pickled bytes."""
    name = full_name(worker)
    if isinstance(worker, str):
        return name
    cls = undecorate(worker)
    imported: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        imported = getattr(imported, part, None)
    if cls.__module__ != "__main__" and (imported is worker or imported is cls):
        return name
    # Workers cannot import a class from __main__, a notebook or a function.
    return bytes(ray.cloudpickle.dumps(worker))


def describe_class(
    worker: Any,
    methods: Sequence[str] = (),
    *,
    asks: Sequence[dict[str, Any]],
    node_id: str,
    runtime_env: Mapping[str, Any] | None,
    timeout_s: float,
    concurrent: bool | Literal["auto"] = False,
) -> WorkerClass:
    """Describe a class in this process, or in one short task on the node if only its name is given."""
    target = make_target(worker)
    if isinstance(worker, str):
        task = ray.remote(describe).options(
            num_cpus=0,
            max_retries=0,
            runtime_env=dict(runtime_env or {}) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        ref = task.remote(target, list(asks), list(methods))
        try:
            answer = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            ray.cancel(ref, force=True)
            reason = f"The import of {worker!r} on node {node_id[:8]} took more than {timeout_s:g} s (start_s)."
            raise WorkerStartError(reason) from error
        except ray.exceptions.RayTaskError as error:
            reason = explain_missing_module(error.cause) or error.cause
            raise WorkerStartError(
                f"{worker!r} cannot be used as a worker on node {node_id[:8]}: {reason}",
                remote_traceback=remote_traceback(error),
            ) from error
        except ray.exceptions.RayError as error:
            raise WorkerStartError(f"{worker!r} cannot be described on node {node_id[:8]}: {error}") from error
    else:
        answer = describe(worker, list(asks), methods)
    if missing := [name for name in methods if name not in answer["methods"]]:
        raise AttributeError(f"{answer['name']} has no method {', '.join(missing)}, which its builder names")
    if refused := answer["refused"]:
        raise ValueError(
            f"{answer['name']}: {'; '.join(refused)}: a worker of a group cannot have this option of a method. "
            "Remove the option, or create this actor without a group."
        )
    plain = {
        "class": answer["name"],
        "target": target if isinstance(target, str) else "",
        "concurrent": answer["is_async"] if concurrent == "auto" else concurrent,
        "full_names": answer["full_names"],
        "methods": [(name, *described) for name, described in answer["methods"].items()],
    }
    return replace(
        WorkerClass.from_dict(plain),
        target=target,
        options=answer["options"],
        configurations=answer["configurations"],
        cls=None if isinstance(worker, str) else undecorate(worker),
    )


class RayWorkerBuilder:
    """A worker class and the arguments of its constructor, for a group or for one worker at a time.

    Args:
        ray_actor_class_fqn: the full name of a class (then only the workers import it), a class, or a `@ray.remote`
            class. A class that workers cannot import, from `__main__` or a notebook, is shipped by value.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.

    Raises:
        TypeError, ValueError: the argument is neither a class nor the name of one.

    Attributes:
        worker: the class as it was given.
        methods: the names that `with_methods` has added.

    >>> RayWorkerBuilder("collections.Counter", "abc").ray_actor_class_fqn
    'collections.Counter'
    """

    def __init__(self, ray_actor_class_fqn: ClassLike, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn: str = full_name(ray_actor_class_fqn)
        self.worker: ClassLike = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs
        self.methods: tuple[str, ...] = ()

    def with_methods(self, *names: str) -> "RayWorkerBuilder":
        """Return a builder of the same worker with more methods, whose names begin with an underscore.

        Args:
            names: the methods of the class that can be called beside its public ones.
        """
        for name in names:
            if not name.startswith("_") or name.startswith(("__", "_fairlead_")):
                raise ValueError(f"with_methods names methods with one leading underscore, got {name!r}")
        builder = copy.copy(self)
        builder.methods = (*self.methods, *names)
        return builder

    def __repr__(self) -> str:
        return f"RayWorkerBuilder({self.ray_actor_class_fqn!r})"

    def create_worker_async(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, Sequence[int]] | None = None,
        **extra_options: Any,
    ) -> tuple[ObjectRef[Any], Any]:
        """Start one worker in a bundle, outside any group.

        Args:
            placement_group: a group that Ray has placed.
            placement_group_bundle_index: the bundle.
            num_gpus: the worker's share of the bundle's GPUs, which `configure_worker` can override.
            bundle_indices: passed to `configure_worker`.
            extra_options: Ray options, merged over those of the class.

        Returns:
            A ref of the worker's handle, which is ready when its constructor has finished, or holds the error of
            that; and the handle at once. It has the class's own methods.

        Raises:
            TypeError, ValueError: a worker cannot have this class or these options.
            WorkerStartError: the class cannot be inspected on its node.
        """
        node_ids = read_placement_group(placement_group)["bundles_to_node_id"]
        node_id = node_ids[placement_group_bundle_index]
        ask = {
            "num_gpus": num_gpus,
            "bundle_indices": bundle_indices,
            "num_gpus_per_node": sum(other == node_id for other in node_ids.values()),
        }
        described = describe_class(
            self.worker,
            self.methods,
            asks=[ask],
            node_id=node_id,
            runtime_env=extra_options.get("runtime_env"),
            timeout_s=START_S,
        )
        resources, env_vars, init_kwargs, overrides = described.configuration(0)
        own = {"num_gpus": num_gpus, **resources, **({"runtime_env": overrides} if overrides else {})}
        options = recursive_merge_options(recursive_merge_options(described.options, own), extra_options)
        check_concurrency(options, concurrent=False)
        variables, loader = worker_environment(configured=env_vars)
        if loader:
            options = recursive_merge_options(options, {"runtime_env": {"env_vars": loader}})
        options.setdefault("num_cpus", 1)
        handle = described.actor_class.options(
            **options,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index, placement_group_capture_child_tasks=True
            ),
        ).remote()
        arguments = Arguments()
        facts = {"env": variables}
        ready = handle._fairlead_start.remote(
            facts,
            [arguments.prepare(described.target)],
            [arguments.prepare(value) for value in self.args],
            {name: arguments.prepare(value) for name, value in {**self.kwargs, **init_kwargs}.items()},
        )
        return handle._fairlead_give.remote(handle, ready), handle

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, Sequence[int]] | None = None,
        **extra_options: Any,
    ) -> Any:
        """Start one worker as `create_worker_async` does, and wait for its constructor.

        Returns:
            The actor handle.

        Raises:
            TypeError, ValueError: as `create_worker_async` does.
            WorkerStartError: as `create_worker_async` does; or the constructor has not finished within 600 s, and the
                worker has been killed.
            Exception: the constructor's own exception.
        """
        ready, handle = self.create_worker_async(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        if not ray.wait([ready], timeout=START_S)[0]:
            ray.kill(handle)
            raise WorkerStartError(
                f"the constructor of {self.ray_actor_class_fqn} has not finished after {START_S:g} s: it takes longer, "
                f"or bundle {placement_group_bundle_index} has no room (see `ray.util.placement_group_table()`)"
            )
        ray.get(ready)
        return handle


def _unbound(function: Any) -> Any:
    """Return the function of a class method that was looked up on its class."""
    return function.__func__ if isinstance(getattr(function, "__self__", None), type) else function


def _without_ray(function: Any) -> Any:
    """Return the user's own method for a method of a `@ray.remote` class, which wraps its methods."""
    owner = getattr(function, "__self__", None)
    return getattr(undecorate(owner), function.__name__, function) if isinstance(owner, ActorClass) else function


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function for errors and logs."""
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is not None and name.endswith("<lambda>"):
        name = f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return name


def signature_without_worker(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature without the first parameter, which is the worker; None if Python cannot tell."""
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


def pickle_function(function: Callable[..., Any]) -> bytes:
    """Pickle a function as `ray.cloudpickle` does; the error names the part that cannot be pickled."""
    try:
        return bytes(ray.cloudpickle.dumps(function))
    except Exception as error:
        name = function_name(function)
        while isinstance(function, functools.partial):
            function = function.func
        path, part, reason = find_unpicklable(function, error)
        used = f"it uses {path.removeprefix('.')!r}, a {type(part).__qualname__}: " if path else ""
        raise TypeError(
            f"the function {name!r} cannot be sent to the workers: {used}{reason}. Pass the value as an "
            "argument, or create it inside the function."
        ) from error
