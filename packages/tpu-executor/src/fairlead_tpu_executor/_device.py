# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that run on every host of slices: called they give values, by `.remote(...)` references."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from ray.actor import ActorClass

from ._accelerators.config import AcceleratorConfigType
from ._device_decorator import DeviceDecorator
from ._instances import DeviceInstances
from ._pool import SlicePool, arranged
from ._run.work import Work, work_of

__all__ = ["DeviceClass", "DeviceFunction", "device_remote"]


class _OnDevices:
    """A function or a class with the slices that it runs on: taken on first use, kept until `close()`.

    Attributes:
        target: what was decorated.
        work: what could be said of it before anything was reserved.
        pool: the slices, as a `SlicePool`.
    """

    def __init__(self, target: Any, config: AcceleratorConfigType, *, of_class: bool) -> None:
        self.work: Work = work_of(target, of_class=of_class)
        self.target = target
        self.pool: SlicePool = SlicePool(config)
        self.__doc__ = self.work.function.__doc__

    def close(self) -> bool:
        """End what still runs and give everything back. Can be repeated; the next use reserves again."""
        return self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceFunction(_OnDevices):
    """A function that runs on every host, each time in a fresh process."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run it once, and return what it returns, in the order of the hosts.

        Raises:
            InsufficientSlicesError: as of `remote`.
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`.
            Exception: what the function raised, or Ray's error of a host that was lost; the first in that order.
        """
        return self.pool.get(self.pool.submit(self.target, *args, **kwargs))

    def remote(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Start it; references to what it returns, in the order of the hosts. Calls on one host run in turn.

        Raises:
            InsufficientSlicesError: too few slices within the scale timeout; nothing is held then.
        """
        return arranged(self.pool.submit(self.target, *args, **kwargs), self.pool.config.flatten)


class DeviceClass(_OnDevices):
    """A class of which every host has an instance, with state, for as long as it is wanted."""

    def __call__(self, *args: Any, **kwargs: Any) -> "DeviceInstances":
        """Make the instances, as `remote`. Closing them gives the slices back too.

        Raises:
            Exception: as of `remote`.
        """
        return self._made(args, kwargs, self.close)

    def remote(self, *args: Any, **kwargs: Any) -> "DeviceInstances":
        """Make the instances. There is one set of them at a time: close the one before.

        Raises:
            InsufficientSlicesError: too few slices within the scale timeout; nothing is held then.
            ResourceInsufficientError: there are instances already.
        """
        return self._made(args, kwargs, None)

    def _made(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], give_back: Callable[[], object] | None
    ) -> "DeviceInstances":
        actors, claim = self.pool.start(self.target, args, kwargs)
        return DeviceInstances(self.work.function, actors, claim, self.pool, give_back)


def device_remote(*, accelerator_config: AcceleratorConfigType, flatten: bool = True) -> DeviceDecorator:
    """Decorate a function (gives a `DeviceFunction`) or a class (a `DeviceClass`).

    Args:
        accelerator_config: what to run on.
        flatten: one list of references instead of one per slice.

    Raises:
        TypeError, ValueError: here or when it decorates: what cannot be run. Nothing is reserved before it is used.

    >>> from fairlead_tpu_executor import CpuAcceleratorConfig
    >>> @device_remote(accelerator_config=CpuAcceleratorConfig(worker_count=2))
    ... def train(steps):
    ...     return steps
    >>> train.pool
    SlicePool(1 x cpu, 0 held)
    """
    config = replace(accelerator_config, flatten=flatten)

    def decorate(target: Any) -> Any:
        of_class = isinstance(target, (type, ActorClass))
        return (DeviceClass if of_class else DeviceFunction)(target, config, of_class=of_class)

    return decorate
