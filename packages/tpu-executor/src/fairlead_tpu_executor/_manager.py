# SPDX-License-Identifier: Apache-2.0
"""Managers that hold slices from call to call: `TpuRemoteManager` and `SlicePoolManager`."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from . import _host
from ._accelerators.config import TpuAcceleratorConfig
from ._accelerators.slices import SliceInfo
from ._pool import ClosesOnExit, SlicePool, arrange
from ._run.work import Function, take_options


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
        tpu_version: the type of the slices.
        pod_count: the number of slices, or the list of allowed numbers.
        base_env: the environment variables of every call.
        runtime_env: the Ray runtime_env of every call.
        coord_port: the port of the coordinator of several slices; None for the default.
        pool: the slices, as a `SlicePool`.
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


class SlicePoolManager:
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

    def __enter__(self) -> "SlicePoolManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.drain_actor_pool()
