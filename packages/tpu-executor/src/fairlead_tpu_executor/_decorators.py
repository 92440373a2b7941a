# SPDX-License-Identifier: Apache-2.0
"""Functions that run on slices whenever they are called. All arguments of a call are the function's."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ._accelerators.config import AcceleratorConfigType
from ._executor import check_one_slice
from ._pool import SlicePool
from ._run.status import JobStatus
from ._run.work import Function

__all__ = ["autoscale_execute", "autoscale_execute_resumable", "execute", "execute_resumable"]

_Once = Callable[[Function], Callable[..., JobStatus]]
_UntilItSucceeds = Callable[[Function], Callable[..., list[Any]]]


def _decorator(
    config: AcceleratorConfigType, options: dict[str, Any], *, again: bool, one_slice: bool = False
) -> Callable[[Any], Any]:
    config = replace(config, **options)
    if one_slice:
        check_one_slice(config)

    def decorate(function: Any) -> Callable[..., Any]:
        @functools.wraps(getattr(function, "_function", function))
        def call(*args: Any, **kwargs: Any) -> Any:
            with contextlib.closing(SlicePool(config)) as pool:
                return (pool.run if again else pool.attempt)(function, *args, **kwargs)

        return call

    return decorate


def execute(accelerator_config: AcceleratorConfigType, **options: Any) -> _Once:
    """As `RayExecutor.execute`. Options are those of the configuration, such as `flatten=False`.

    Raises:
        ValueError: the configuration allows more than one slice.
        TypeError, ValueError: an option that it does not have, or cannot have so.

    >>> from fairlead_tpu_executor import TpuAcceleratorConfig
    >>> execute(TpuAcceleratorConfig("v4-16", pod_count=2))
    Traceback (most recent call last):
    ValueError: pod_count is 2, and execute runs on one slice: use autoscale_execute or autoscale_execute_resumable
    """
    return _decorator(accelerator_config, options, again=False, one_slice=True)


def autoscale_execute(accelerator_config: AcceleratorConfigType, **options: Any) -> _Once:
    """As `RayExecutor.autoscale_execute`. Options, and what is raised for them, are those of the configuration."""
    return _decorator(accelerator_config, options, again=False)


def execute_resumable(accelerator_config: AcceleratorConfigType, **options: Any) -> _UntilItSucceeds:
    """As `RayExecutor.execute_resumable`. Options are those of the configuration, such as `max_retries_failure=3`.

    Raises:
        ValueError: the configuration allows more than one slice.
        TypeError, ValueError: an option that it does not have, or cannot have so.
    """
    return _decorator(accelerator_config, options, again=True, one_slice=True)


def autoscale_execute_resumable(accelerator_config: AcceleratorConfigType, **options: Any) -> _UntilItSucceeds:
    """As `RayExecutor.autoscale_execute_resumable`. Options, and errors for them, are those of the configuration."""
    return _decorator(accelerator_config, options, again=True)
