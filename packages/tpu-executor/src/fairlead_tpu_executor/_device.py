# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that run on every host of slices: called they give values, by `.remote(...)` references."""

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

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run it and return what it returns, in the order of the hosts; lost slices are replaced meanwhile.

        Raises:
            Exception: as of `SlicePool.run`, and what the function raised.
        """
        return arranged(self.pool.run(self.target, *args, **kwargs), self.pool.config.flatten)

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
        return DeviceInstances(self.work.function, actors, claim, self.pool.config.flatten, give_back)


class DeviceInstances:
    """An instance on every host: `instances.method(...)` calls it on all, and returns the values in order.

    `instances.method.remote(...)` returns references instead. State is kept from call to call, in one process per host.
    When a host is lost, so is its state: values and references raise Ray's errors. Close the instances and make others.
    """

    def __init__(
        self,
        cls: Callable[..., Any],
        actors: list[list[Any]],
        claim: SlotClaim,
        flatten: bool,
        give_back: Callable[[], object] | None = None,
    ) -> None:
        self._cls, self._actors, self._claim, self._flatten = cls, actors, claim, flatten
        self._give_back = give_back

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("_") or not callable(getattr(self._cls, method, None)):
            raise AttributeError(f"{getattr(self._cls, '__name__', self._cls)} has no public method {method!r}")
        return _Method(self._actors, method, self._flatten)

    def close(self) -> None:
        """End the instances. Can be repeated.

        Instances that were made by a call of the class give its slices back. After `remote` the slices stay with the
        class, until that is closed.
        """
        for actor in (actor for of_slice in self._actors for actor in of_slice):
            ray.kill(actor)
        self._claim.release()
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()

    def __enter__(self) -> "DeviceInstances":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method:
    """A method of all instances."""

    def __init__(self, actors: list[list[Any]], method: str, flatten: bool) -> None:
        self._actors, self._method, self._flatten = actors, method, flatten

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it on every instance, and return what it returns, in the order of the hosts.

        Raises:
            Exception: what the method raised, or Ray's error of a host that was lost; the first in that order.
        """
        refs = self._called(args, kwargs)
        values = iter(ray.get([ref for of_slice in refs for ref in of_slice]))
        return arranged([[next(values) for _ in of_slice] for of_slice in refs], self._flatten)

    def remote(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it on every instance; references to what it returns, in the order of the hosts."""
        return arranged(self._called(args, kwargs), self._flatten)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
        payload = ray.put((None, args, kwargs))
        return [[actor.invoke.remote(self._method, [payload]) for actor in of_slice] for of_slice in self._actors]


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
