# SPDX-License-Identifier: Apache-2.0
"""Thin layers with the classic names: `RayExecutor` and its decorators, `TpuRemoteManager` and `SlicePoolManager`."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from . import _host
from ._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from ._accelerators.slices import SliceInfo
from ._pool import ClosesOnExit, SlicePool, arrange
from ._ray_private import unwrap_remote
from ._run.verdicts import JobStatus
from ._run.work import Function, take_options

_Once = Callable[[Function], Callable[..., JobStatus]]
_UntilItSucceeds = Callable[[Function], Callable[..., list[Any]]]


class RayExecutor:
    """Calls a function on every host of slices that are reserved for the call.

    A keyword argument with the name of one of our options belongs to the function if the function has a parameter of
    that name. The option can then be set in the configuration, as all options can. All four methods raise the errors of
    `SlicePool.run`.
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
        options = take_options(remote_fn, {"flatten": flatten}, kwargs)
        return autoscale_execute(accelerator_config, **options)(remote_fn)(**kwargs)

    @staticmethod
    def execute_resumable(
        remote_fn: Function,
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int | None = None,
        max_retries_failure: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on one slice until it succeeds; return its results in the order of the hosts."""
        options = {"max_retries_preemption": max_retries_preemption, "max_retries_failure": max_retries_failure}
        options = take_options(remote_fn, options, kwargs)
        return execute_resumable(accelerator_config, **options)(remote_fn)(**kwargs)

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
        budgets = {"max_retries_preemption": max_retries_preemption, "max_retries_failure": max_retries_failure}
        options = take_options(remote_fn, {**budgets, "flatten": flatten}, kwargs)
        return autoscale_execute_resumable(accelerator_config, **options)(remote_fn)(**kwargs)


def execute(accelerator_config: AcceleratorConfigType, **options: Any) -> _Once:
    """Decorate a function to run as by `RayExecutor.execute`. All arguments of a call belong to the function.

    Args:
        accelerator_config: the configuration.
        options: options of the configuration to replace, such as `flatten=False`.

    Raises:
        ValueError: the configuration allows more than one slice.
        TypeError, ValueError: the configuration does not have an option, or refuses its value.

    >>> from fairlead_tpu_executor import TpuAcceleratorConfig
    >>> execute(TpuAcceleratorConfig("v4-16", pod_count=2))
    Traceback (most recent call last):
    ValueError: pod_count is 2, and execute runs on one slice. Use autoscale_execute or autoscale_execute_resumable.
    """
    return _decorate(accelerator_config, options, SlicePool.attempt, one_slice=True)


def autoscale_execute(accelerator_config: AcceleratorConfigType, **options: Any) -> _Once:
    """Decorate a function to run as by `RayExecutor.autoscale_execute`.

    Options and their errors are as for `execute`.
    """
    return _decorate(accelerator_config, options, SlicePool.attempt)


def execute_resumable(accelerator_config: AcceleratorConfigType, **options: Any) -> _UntilItSucceeds:
    """Decorate a function to run as by `RayExecutor.execute_resumable`.

    Options, such as `max_retries_failure=3`, and their errors are as for `execute`.
    """
    return _decorate(accelerator_config, options, SlicePool.run, one_slice=True)


def autoscale_execute_resumable(accelerator_config: AcceleratorConfigType, **options: Any) -> _UntilItSucceeds:
    """Decorate a function to run as by `RayExecutor.autoscale_execute_resumable`.

    Options and their errors are as for `execute`.
    """
    return _decorate(accelerator_config, options, SlicePool.run)


def _decorate(
    config: AcceleratorConfigType, options: dict[str, Any], method: Callable[..., Any], *, one_slice: bool = False
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
            with contextlib.closing(SlicePool(config)) as pool:  # It reserves nothing before the function is checked.
                return method(pool, function, *args, **kwargs)

        return call

    return decorate


def resolve_maybe_refs(values: Any) -> Any:
    """Replace references by their values, in one value or in lists and tuples.

    >>> resolve_maybe_refs([1, 2])
    [1, 2]
    """
    if isinstance(values, ray.ObjectRef):
        return ray.get(values)
    if type(values) in (list, tuple):  # A named tuple is one of the function's own values.
        return type(values)(resolve_maybe_refs(one) for one in values)
    return values


class TpuRemoteManager(ClosesOnExit):
    """Calls functions and methods on every host of slices that are kept from call to call.

    Each call runs in a new process, so that no handle of an accelerator outlives it.

    Args:
        tpu_version: the type of the slices.
        pod_count: the number of slices, or a list of allowed numbers.
        base_env: environment variables for every call.
        runtime_env: a Ray runtime_env for every call.
        coord_port: the port of the coordinator of several slices.
        options: the further arguments of `TpuAcceleratorConfig`.

    Raises:
        TypeError, ValueError: the configuration raises them.

    Attributes:
        pool: the slices, as a `SlicePool`. All arguments but `options` are attributes too.
    """

    def __init__(
        self,
        tpu_version: str,
        pod_count: int | Sequence[int] = 1,
        *,
        base_env: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        coord_port: int | None = None,
        **options: Any,
    ) -> None:
        config = TpuAcceleratorConfig(
            tpu_version,
            pod_count,
            execution_env=runtime_env,
            megascale_port=coord_port,
            **{**options, "flatten": False},
        )
        self.tpu_version: str = tpu_version
        self.pod_count: int | Sequence[int] = pod_count
        self.base_env: dict[str, str] = dict(base_env or {})
        self.runtime_env: dict[str, Any] = dict(runtime_env or {})
        self.coord_port: int | None = coord_port
        self.pool: SlicePool = SlicePool(config.with_environment_variables(base_env))

    def ensure(self) -> "TpuRemoteManager":
        """Reserve healthy slices, and replace lost ones. Raises the errors of `SlicePool.reserve`."""
        self.pool.reserve()
        return self

    def run_function(self, fn: Function, /, *args: Any, flatten: bool | None = None, **kwargs: Any) -> list[Any]:
        """Call a function on every host. Arguments, results and errors are those of `SlicePool.run`."""
        given = take_options(fn, {"flatten": flatten}, kwargs)
        return arrange(self.pool.run(fn, *args, **kwargs), given.get("flatten", True))

    def run_class_method(
        self,
        cls_obj: type,
        init_args: Sequence[Any],
        init_kwargs: Mapping[str, Any],
        method_name: str,
        *args: Any,
        flatten: bool | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Make an instance on every host and call one of its methods.

        Results and errors are those of `run_function`.
        """
        function = functools.partial(_host.call_method, cls_obj, tuple(init_args), dict(init_kwargs), method_name)
        function.__name__ = f"{cls_obj.__name__}.{method_name}"  # type: ignore[attr-defined]
        given = take_options(getattr(cls_obj, method_name), {"flatten": flatten}, kwargs)
        return arrange(self.pool.run(function, *args, **kwargs), given.get("flatten", True))

    def close(self) -> bool:
        """Give everything back. Can be repeated; the next call reserves again."""
        return self.pool.close()

    def __enter__(self) -> "TpuRemoteManager":
        return self.ensure()


class SlicePoolManager(contextlib.AbstractContextManager["SlicePoolManager"]):
    """A pool of slices whose number of slices is set after it is made.

    Args:
        tpu_type: the type of the slices.
        options: the further arguments of `TpuAcceleratorConfig`.

    Raises:
        TypeError, ValueError: the configuration raises them.

    Attributes:
        pool: the slices, as a `SlicePool`.
    """

    def __init__(self, tpu_type: str, **options: Any) -> None:
        self.pool: SlicePool = SlicePool(tpu_type, **{**options, "flatten": False})

    def scale_multislice(self, num_slices: int | Sequence[int]) -> None:
        """Reserve `num_slices` slices; a list means its largest number that is free.

        Raises the errors of `SlicePool.reserve`.
        """
        self.pool.scale(num_slices)

    def prepare_all_slices(self) -> None:
        """Check all hosts, and replace lost slices. Raises the errors of `SlicePool.reserve`."""
        self.pool.reserve()

    def get_all_pool_members(self) -> list[SliceInfo]:
        """Return the slices that are held, in order."""
        return list(self.pool.slices)

    def execute_on_each_slice(self, fn: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on worker 0 of each slice. Results are one per slice, errors those of `SlicePool.run`."""
        return arrange(self.pool.run_on_first_hosts(fn, *args, **kwargs), True)

    def execute_on_each_host(self, fn: Function, /, *args: Any, **kwargs: Any) -> list[list[Any]]:
        """Call a function on every host; return one list of results per slice. Raises the errors of `SlicePool.run`."""
        return self.pool.run(fn, *args, **kwargs)

    def execute_on_each_host_flat(self, fn: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every host; return one list of results. Raises the errors of `SlicePool.run`."""
        return arrange(self.pool.run(fn, *args, **kwargs), True)

    def drain_actor_pool(self) -> None:
        """Give all slices back. Can be repeated; the next use reserves again."""
        self.pool.close()

    def __exit__(self, *_: object) -> None:
        self.drain_actor_pool()
