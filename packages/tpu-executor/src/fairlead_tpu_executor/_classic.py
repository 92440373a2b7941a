# SPDX-License-Identifier: Apache-2.0
"""The names of eray, over pools: `RayExecutor`, its decorators, and the two managers."""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import ray

from fairlead_placement import extension

from ._config import MEGASCALE_DEFAULT_PORT, AcceleratorConfigType, TpuAcceleratorConfig
from ._pool import ClosesOnExit, SlicePool
from ._ray_private import unwrap_remote
from ._slices import GENERATIONS, SliceInfo, canonical_name, find_type
from ._verdicts import JobStatus
from ._work import Function, check_call, check_method, take_options

_Once = Callable[[Function], Callable[..., JobStatus]]
_UntilItSucceeds = Callable[[Function], Callable[..., list[Any]]]
_Env = Mapping[str, Any] | None
_BUDGETS = ("max_retries_preemption", "max_retries_failure")
# The managers run a function once unless their options say otherwise.
_ONCE = dict.fromkeys(_BUDGETS, 0)


class RayExecutor:
    """Calls a function on every host of slices that are reserved for the call.

    A keyword with the name of an option belongs to the function if its signature names such a parameter; the
    configuration can set the option then. Arguments that the function cannot take are a TypeError before anything is
    reserved. All four methods raise the errors of `SlicePool.run`.
    """

    @staticmethod
    def execute(remote_fn: Function, accelerator_config: AcceleratorConfigType, **kwargs: Any) -> JobStatus:
        """Run a function once on one slice, and return the outcome as a value. More slices are a ValueError."""
        return execute(accelerator_config)(remote_fn)(**kwargs)

    @staticmethod
    def autoscale_execute(
        remote_fn: Function, accelerator_config: AcceleratorConfigType, flatten: bool | None = None, **kwargs: Any
    ) -> JobStatus:
        """Run a function once, on as many slices as are free, and return the outcome as a value."""
        return autoscale_execute(accelerator_config)(remote_fn)(**_given(flatten=flatten), **kwargs)

    @staticmethod
    def execute_resumable(
        remote_fn: Function,
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int | None = None,
        max_retries_failure: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on one slice until it succeeds; return its results in the order of the hosts."""
        given = _given(max_retries_preemption=max_retries_preemption, max_retries_failure=max_retries_failure)
        return execute_resumable(accelerator_config)(remote_fn)(**given, **kwargs)

    @staticmethod
    def autoscale_execute_resumable(
        remote_fn: Function,
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int | None = None,
        max_retries_failure: int | None = None,
        flatten: bool | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on as many slices as are free until it succeeds; return its results in the hosts' order."""
        given = _given(max_retries_preemption=max_retries_preemption, max_retries_failure=max_retries_failure)
        return autoscale_execute_resumable(accelerator_config)(remote_fn)(**given, **_given(flatten=flatten), **kwargs)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, which stands for the value of the configuration."""
    return {name: value for name, value in options.items() if value is not None}


def execute(accelerator_config: AcceleratorConfigType, **options: Any) -> _Once:
    """Decorate a function to run as by `RayExecutor.execute`. Options replace those of the configuration.

    A call of a decorated function may contain the options of its method of `RayExecutor`, by keyword:
    `train(x=1, max_retries_failure=3)` under `execute_resumable`. Raises a TypeError or a ValueError if the
    configuration lacks an option or refuses its value, or allows more than one slice.
    """
    return _decorate(accelerator_config, options, SlicePool.attempt, one_slice=True)


def autoscale_execute(accelerator_config: AcceleratorConfigType, **options: Any) -> _Once:
    """Decorate a function to run as by `RayExecutor.autoscale_execute`; the rest is as for `execute`."""
    return _decorate(accelerator_config, options, SlicePool.attempt, ("flatten",))


def execute_resumable(accelerator_config: AcceleratorConfigType, **options: Any) -> _UntilItSucceeds:
    """Decorate a function to run as by `RayExecutor.execute_resumable`; the rest is as for `execute`."""
    return _decorate(accelerator_config, options, SlicePool.run, _BUDGETS, one_slice=True)


def autoscale_execute_resumable(accelerator_config: AcceleratorConfigType, **options: Any) -> _UntilItSucceeds:
    """Decorate a function to run as by `RayExecutor.autoscale_execute_resumable`; the rest is as for `execute`."""
    return _decorate(accelerator_config, options, SlicePool.run, (*_BUDGETS, "flatten"))


def _decorate(
    config: AcceleratorConfigType,
    options: dict[str, Any],
    method: Callable[..., Any],
    of_call: Sequence[str] = (),
    *,
    one_slice: bool = False,
) -> Callable[[Any], Any]:
    config = replace(config, **options)
    if one_slice and config.sizes != (1,):
        raise ValueError(
            f"pod_count is {' or '.join(map(str, config.sizes))}, and execute runs on one slice. Use "
            "autoscale_execute or autoscale_execute_resumable."
        )

    def decorate(function: Any) -> Callable[..., Any]:
        @functools.wraps(unwrap_remote(function)[0])
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in of_call if name in kwargs}
            changed = replace(config, **take_options(function, given, kwargs))
            with contextlib.closing(SlicePool(changed)) as pool:  # It reserves nothing before the function is checked.
                return method(pool, function, *args, **kwargs)

        return call

    return decorate


def resolve_maybe_refs(items: Any) -> Any:
    """Return the values of a list of references, or of one reference; anything else, such as a mixed list, as it is."""
    if isinstance(items, ray.ObjectRef):
        return ray.get(items)
    if isinstance(items, list | tuple) and items and all(isinstance(item, ray.ObjectRef) for item in items):
        return ray.get(list(items))
    return items


def _as_texts(env: Mapping[str, Any] | None) -> dict[str, str]:
    """Return environment variables with their values as text, without those that are None."""
    return {str(name): str(value) for name, value in dict(env or {}).items() if value is not None}


def _reconfigure(pool: SlicePool, **options: Any) -> SlicePool:
    """Return a pool on the same slices, with other options for a call."""
    pool = copy.copy(pool)
    pool.config = replace(pool.config, **options)
    return pool


class TpuRemoteManager(ClosesOnExit):
    """Calls functions and methods on every host of slices that are kept from call to call.

    Each call runs in a new process, so that no handle of an accelerator outlives it. It runs once, and the next call
    replaces slices that were lost.

    Args:
        tpu_version: the type of the slices; or a generation such as "v4", if the cluster has slices of only one type of
            that generation when the manager is first used.
        pod_count: the number of slices, also as text, or a list of allowed numbers.
        base_env: environment variables for every call. Their values become text.
        runtime_env: a Ray runtime_env for every call.
        coord_port: the port of the coordinator of several slices, also as text; None for `COORD_PORT`, or 8081.
        options: the further arguments of `TpuAcceleratorConfig`, such as `max_retries_failure`, which is 0 here.

    Raises:
        TypeError, ValueError: the configuration raises them; for a generation, at the first use.
    """

    def __init__(
        self,
        tpu_version: str,
        pod_count: int | str | Sequence[int] = 1,
        *,
        base_env: Mapping[str, Any] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        coord_port: int | str | None = MEGASCALE_DEFAULT_PORT,
        **options: Any,
    ) -> None:
        self.tpu_version: str = tpu_version
        self.pod_count: int | Sequence[int] = int(pod_count) if isinstance(pod_count, str) else pod_count
        self.base_env: dict[str, Any] = dict(base_env or {})
        self.runtime_env: dict[str, Any] = dict(runtime_env or {})
        self.coord_port: int | None = None if coord_port is None else int(coord_port)
        env_vars = {**(self.runtime_env.get("env_vars") or {}), **_as_texts(self.base_env)}
        env = {**self.runtime_env, "env_vars": env_vars}
        options = {"pod_count": self.pod_count, "execution_env": env, "megascale_port": self.coord_port, **options}
        self._make_config = functools.partial(TpuAcceleratorConfig, **{**_ONCE, **options})
        if canonical_name(str(tpu_version)) not in GENERATIONS:
            self._make_config(tpu_version=tpu_version)

    @functools.cached_property
    def pool(self) -> SlicePool:
        """The slices. ValueError if `tpu_version` is a generation and the cluster has not just one type of it."""
        kind = self.tpu_version
        if canonical_name(kind) in GENERATIONS:
            with extension.head_deadline():
                kind = find_type(extension.read_nodes(), kind)
        return SlicePool(self._make_config(tpu_version=kind))

    def ensure(self) -> Self:
        """Reserve healthy slices, and replace lost ones. Raises the errors of `pool` and of `SlicePool.reserve`."""
        self.pool.reserve()
        return self

    def run_function(self, fn: Function, *args: Any, flatten: bool | None = None, **kwargs: Any) -> list[Any]:
        """Call a function, plain or `@ray.remote`, on every host, and return its results.

        They are one list, or with `flatten=False` one list per slice; None stands for the manager's option. The keyword
        belongs to the function if its signature names such a parameter. Raises the errors of `SlicePool.run`; with the
        default options a `PreemptionLimitError` if a slice was lost.
        """
        options = take_options(fn, _given(flatten=flatten), kwargs)
        return _reconfigure(self.pool, **options).run(fn, *args, **kwargs)

    def run_class_method(
        self,
        cls_obj: type,
        init_args: Sequence[Any],
        init_kwargs: Mapping[str, Any],
        method_name: str,
        *call_args: Any,
        flatten: bool | None = None,
        **call_kwargs: Any,
    ) -> list[Any]:
        """Make an instance on every host, call one of its methods, and return the results as `run_function` does."""
        options = take_options(getattr(cls_obj, method_name, None), _given(flatten=flatten), call_kwargs)
        check_call(cls_obj.__name__, cls_obj, init_args, init_kwargs)
        check_method(cls_obj, method_name, call_args, call_kwargs)

        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(cls_obj(*init_args, **init_kwargs), method_name)(*args, **kwargs)

        function.__name__ = f"{cls_obj.__name__}.{method_name}"
        return _reconfigure(self.pool, **options).run(function, *call_args, **call_kwargs)

    def close(self) -> bool:
        """Give everything back. Can be repeated; the next call reserves again."""
        return "pool" not in vars(self) or self.pool.close()

    def __enter__(self) -> Self:
        return self.ensure()


class SlicePoolManager(ClosesOnExit):
    """A pool of slices whose number of slices is set after it is made.

    Each call of a function runs once and may have more environment variables (`env`) and a Ray `runtime_env`. A keyword
    `env` or `runtime_env` belongs to the function if its signature names such a parameter. The errors are those of
    `TpuRemoteManager.run_function`, and those of `SlicePool.reserve`.

    Args:
        tpu_type: the type of the slices.
        options: the further arguments of `TpuAcceleratorConfig`, except `flatten`.

    Attributes:
        pool: the slices, as a `SlicePool`.

    Raises:
        TypeError, ValueError: the configuration raises them.
    """

    def __init__(self, tpu_type: str, **options: Any) -> None:
        # A `flatten` is a TypeError: `execute_on_each_host` and `execute_on_each_host_flat` stand for both values.
        self.pool: SlicePool = SlicePool(tpu_type, **{**_ONCE, **options}, flatten=False)

    def scale_multislice(self, num_slices: int | Sequence[int]) -> None:
        """Reserve `num_slices` slices; a list means its largest number that is free."""
        self.pool.scale(num_slices)

    def prepare_all_slices(self) -> None:
        """Check all hosts, and replace lost slices."""
        self.pool.reserve()

    def get_all_pool_members(self) -> list[SliceInfo]:
        """Return the slices that are held, in order."""
        return list(self.pool.slices)

    def execute_on_each_slice(
        self, remote_fn: Function, env: _Env = None, runtime_env: _Env = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function on worker 0 of each slice; return one result per slice."""
        return self._for_call(remote_fn, kwargs, True, env, runtime_env).run_on_first_hosts(remote_fn, **kwargs)

    def execute_on_each_host(self, fn: Function, *args: Any, env: _Env = None, **kwargs: Any) -> list[list[Any]]:
        """Call a function on every host; return one list of results per slice."""
        return self._for_call(fn, kwargs, False, env).run(fn, *args, **kwargs)

    def execute_on_each_host_flat(
        self, remote_fn: Function, env: _Env = None, runtime_env: _Env = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function on every host; return one list of results."""
        return self._for_call(remote_fn, kwargs, True, env, runtime_env).run(remote_fn, **kwargs)

    def schedule_on_each_host(
        self, remote_fn: Function, env: _Env = None, runtime_env: _Env = None, **kwargs: Any
    ) -> list[Any]:
        """Start a function on every host; return one list of references. Raises the errors of `SlicePool.submit`."""
        return self._for_call(remote_fn, kwargs, True, env, runtime_env).submit(remote_fn, **kwargs)

    def _for_call(
        self, function: Function, kwargs: dict[str, Any], flatten: bool, env: _Env, runtime_env: _Env = None
    ) -> SlicePool:
        """Return the pool with the variables and the runtime_env of one call."""
        given = take_options(function, _given(env=env, runtime_env=runtime_env), kwargs)
        own = dict(given.get("runtime_env", {}))
        env_vars = {**self.pool.config.env_vars, **(own.get("env_vars") or {}), **_as_texts(given.get("env"))}
        execution_env = {**self.pool.config.execution_env, **own, "env_vars": env_vars}
        return _reconfigure(self.pool, execution_env=execution_env, flatten=flatten)

    def drain_actor_pool(self) -> None:
        """Give all slices back. Can be repeated; the next use reserves again."""
        self.pool.close()

    close = drain_actor_pool
