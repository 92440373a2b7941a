# SPDX-License-Identifier: Apache-2.0
"""Functions on slices that are held only for them: a pool for each call."""

import contextlib
from dataclasses import replace
from typing import Any

import ray

from ._accelerators.config import AcceleratorConfigType
from ._pool import SlicePool
from ._run.status import JobStatus
from ._run.work import Function, own_options

__all__ = ["RayExecutor", "check_one_slice", "resolve_maybe_refs"]


class RayExecutor:
    """Calls a function on every host of slices that are reserved for the call.

    A keyword argument that is the name of one of our options is the function's if the function has a parameter of that
    name; the option is then given on the configuration, as all options can be. All four raise what `SlicePool.run`
    raises.
    """

    @staticmethod
    def execute(remote_fn: Function, accelerator_config: AcceleratorConfigType, **kwargs: Any) -> JobStatus:
        """Run a function once on one slice, and return the outcome as a value. More slices are a ValueError."""
        check_one_slice(accelerator_config)
        with _pool(remote_fn, accelerator_config, {}, kwargs) as pool:
            return pool.attempt(remote_fn, **kwargs)

    @staticmethod
    def autoscale_execute(
        remote_fn: Function, accelerator_config: AcceleratorConfigType, flatten: bool | None = None, **kwargs: Any
    ) -> JobStatus:
        """Run a function once, on as many slices as are free, and return the outcome as a value."""
        with _pool(remote_fn, accelerator_config, {"flatten": flatten}, kwargs) as pool:
            return pool.attempt(remote_fn, **kwargs)

    @staticmethod
    def execute_resumable(
        remote_fn: Function,
        accelerator_config: AcceleratorConfigType,
        max_retries_preemption: int | None = None,
        max_retries_failure: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on one slice until it succeeds; return its results in the hosts' order."""
        check_one_slice(accelerator_config)
        options = {"max_retries_preemption": max_retries_preemption, "max_retries_failure": max_retries_failure}
        with _pool(remote_fn, accelerator_config, options, kwargs) as pool:
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
        with _pool(remote_fn, accelerator_config, {**budgets, "flatten": flatten}, kwargs) as pool:
            return pool.run(remote_fn, **kwargs)


def _pool(
    function: Any, config: AcceleratorConfigType, options: dict[str, Any], kwargs: dict[str, Any]
) -> contextlib.closing[SlicePool]:
    """Not entered: the function is looked at before anything is reserved."""
    return contextlib.closing(SlicePool(replace(config, **own_options(function, options, kwargs))))


def check_one_slice(config: AcceleratorConfigType) -> None:
    """Refuse any other number."""
    if config.sizes != (1,):
        raise ValueError(
            f"pod_count is {' or '.join(map(str, config.sizes))}, and execute runs on one slice: use "
            "autoscale_execute or autoscale_execute_resumable"
        )


def resolve_maybe_refs(values: Any) -> Any:
    """Replace references by what they refer to, in one value or in a list of them.

    >>> resolve_maybe_refs([1, 2])
    [1, 2]
    """
    if isinstance(values, ray.ObjectRef):
        return ray.get(values)
    if type(values) in (list, tuple):  # a named tuple is a value of the function's
        return type(values)(resolve_maybe_refs(one) for one in values)
    return values
