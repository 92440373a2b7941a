# SPDX-License-Identifier: Apache-2.0
"""Functions on slices that are held only for one call: `RayExecutor`, and decorators with the same names."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from ._accelerators.config import AcceleratorConfigType
from ._pool import SlicePool
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
        with _open_pool(remote_fn, accelerator_config, {}, kwargs, one_slice=True) as pool:
            return pool.attempt(remote_fn, **kwargs)

    @staticmethod
    def autoscale_execute(
        remote_fn: Function, accelerator_config: AcceleratorConfigType, flatten: bool | None = None, **kwargs: Any
    ) -> JobStatus:
        """Run a function once, on as many slices as are free, and return the outcome as a value."""
        with _open_pool(remote_fn, accelerator_config, {"flatten": flatten}, kwargs) as pool:
            return pool.attempt(remote_fn, **kwargs)

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
        with _open_pool(remote_fn, accelerator_config, options, kwargs, one_slice=True) as pool:
            return pool.run(remote_fn, **kwargs)

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
        with _open_pool(remote_fn, accelerator_config, {**budgets, "flatten": flatten}, kwargs) as pool:
            return pool.run(remote_fn, **kwargs)


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


def _open_pool(
    function: Any,
    config: AcceleratorConfigType,
    options: dict[str, Any],
    kwargs: dict[str, Any],
    *,
    one_slice: bool = False,
) -> contextlib.closing[SlicePool]:
    """Return a pool that is closed at the end, and reserves nothing before the function is checked."""
    return contextlib.closing(SlicePool(_configure(config, take_options(function, options, kwargs), one_slice)))


def _decorate(
    config: AcceleratorConfigType, options: dict[str, Any], method: Callable[..., Any], *, one_slice: bool = False
) -> Callable[[Any], Any]:
    config = _configure(config, options, one_slice)

    def decorate(function: Any) -> Callable[..., Any]:
        @functools.wraps(unwrap_remote(function)[0])
        def call(*args: Any, **kwargs: Any) -> Any:
            with contextlib.closing(SlicePool(config)) as pool:
                return method(pool, function, *args, **kwargs)

        return call

    return decorate


def _configure(config: AcceleratorConfigType, options: dict[str, Any], one_slice: bool) -> AcceleratorConfigType:
    """Return a configuration with other options; raise a ValueError if it needs one slice and allows another number."""
    config = replace(config, **options)
    if one_slice and config.sizes != (1,):
        raise ValueError(
            f"pod_count is {' or '.join(map(str, config.sizes))}, and execute runs on one slice. Use "
            "autoscale_execute or autoscale_execute_resumable."
        )
    return config


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
