# SPDX-License-Identifier: Apache-2.0
"""Functions and classes whose `.remote(...)` goes to every host of slices, and gives references."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import ray
from ray.actor import ActorClass

from fairlead_placement import SlotClaim

from ._config import AcceleratorConfigType
from ._device_decorator import DeviceDecorator
from ._pool import SlicePool, arranged
from ._work import Work, work_of

__all__ = ["DeviceClass", "DeviceFunction", "DeviceInstances", "device_remote"]


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

    def remote(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Start it; references to what it returns, in the order of the hosts. Calls on one host run in turn.

        Raises:
            InsufficientSlicesError: too few slices within the scale timeout; nothing is held then.
        """
        return arranged(self.pool.submit(self.target, *args, **kwargs), self.pool.config.flatten)


class DeviceClass(_OnDevices):
    """A class of which every host has an instance, with state, for as long as it is wanted."""

    def remote(self, *args: Any, **kwargs: Any) -> "DeviceInstances":
        """Make the instances. There is one set of them at a time: close the one before.

        Raises:
            InsufficientSlicesError: too few slices within the scale timeout; nothing is held then.
            ResourceInsufficientError: there are instances already.
        """
        actors, claim = self.pool.start(self.target, args, kwargs)
        return DeviceInstances(self.work.function, actors, claim, self.pool.config.flatten)


class DeviceInstances:
    """An instance on every host: `instances.method.remote(...)` calls it on all, and gives references in order.

    State is kept from call to call, in one process per host. When a host is lost so is its state: references raise
    Ray's errors, and the instances are closed and made anew.
    """

    def __init__(self, cls: Callable[..., Any], actors: list[list[Any]], claim: SlotClaim, flatten: bool) -> None:
        self._cls, self._actors, self._claim, self._flatten = cls, actors, claim, flatten

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("_") or not callable(getattr(self._cls, method, None)):
            raise AttributeError(f"{getattr(self._cls, '__name__', self._cls)} has no public method {method!r}")
        return _Method(self._actors, method, self._flatten)

    def close(self) -> None:
        """End the instances. Can be repeated. The slices stay with the class, until that is closed."""
        for actor in (actor for of_slice in self._actors for actor in of_slice):
            ray.kill(actor)
        self._claim.release()

    def __enter__(self) -> "DeviceInstances":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method:
    """A method of all instances."""

    def __init__(self, actors: list[list[Any]], method: str, flatten: bool) -> None:
        self._actors, self._method, self._flatten = actors, method, flatten

    def remote(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it on every instance; references to what it returns, in the order of the hosts."""
        payload = ray.put((None, args, kwargs))
        refs = [[actor.invoke.remote(self._method, [payload]) for actor in of_slice] for of_slice in self._actors]
        return arranged(refs, self._flatten)


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
