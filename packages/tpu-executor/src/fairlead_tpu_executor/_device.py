# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that run on every host of slices: a call returns values, `.remote(...)` returns references."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Never, Protocol, overload

import ray

from fairlead_placement import ResourceInsufficientError, Slot, extension

from ._config import AcceleratorConfigType
from ._pool import ClosesOnExit, SlicePool, arrange
from ._ray_private import unwrap_remote
from ._work import Class, Function, check_method, inspect_work
from .exceptions import OpenInstancesError


class _OnDevices(ClosesOnExit):
    """A function or a class with its slices (`pool`), which are taken on first use and kept until `close()`."""

    def __init__(self, target: Any, config: AcceleratorConfigType) -> None:
        self._plain = inspect_work(target, of_class=isinstance(self, DeviceClass)).function
        self.target = target
        self.pool: SlicePool = SlicePool(config)
        wrapper: Any = self
        functools.update_wrapper(wrapper, self._plain, updated=())

    def close(self) -> bool:
        """End what still runs and give everything back. Can be repeated; the next use reserves again."""
        return self.pool.close()


class DeviceFunction(_OnDevices):
    """A function that runs on every host, each time in a new process."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the function once, and return its results in the order of the hosts. Raises the errors of `run`."""
        return self.pool.run(self.target, *args, **kwargs)

    def remote(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Start the function, and return references in the order of the hosts. Calls on one host run one by one.

        Raises the errors of `SlicePool.submit`.
        """
        return self.pool.submit(self.target, *args, **kwargs)


class DeviceClass(_OnDevices):
    """A class with an instance on every host, which keeps its state until it is closed."""

    def __call__(self, *args: Any, **kwargs: Any) -> "DeviceInstances":
        """Make the instances. There is one set of them at a time: close the previous one first.

        Raises an OpenInstancesError if there are instances already, a TypeError if the class does not take these
        arguments, and the errors of `SlicePool.reserve`.
        """
        try:
            actors, slots, claim = self.pool.start(self.target, args, kwargs)
        except ResourceInsufficientError as error:
            raise OpenInstancesError(self.__name__) from error  # type: ignore[attr-defined]
        return DeviceInstances(self._plain, actors, slots, claim, self.pool)

    remote = __call__


@dataclass(eq=False, repr=False)
class DeviceInstances(ClosesOnExit):
    """An instance on every host: `instances.method(...)` calls it on all, and returns the values in order.

    `instances.method.remote(...)` returns references instead. State is kept from call to call, in one process per host.
    When a host is lost, so is its state: values and references raise Ray's errors. Close the instances and make others.
    """

    _cls: Callable[..., Any]
    _actors: Sequence[Any]
    _slots: Sequence[Slot]
    _claim: extension.SlotClaim
    _pool: SlicePool
    _made_on: object = field(default_factory=extension.connection)
    _is_open: bool = True

    def __getattr__(self, method: str) -> "_Method":
        # A copy in the making does not have its own attributes yet, and those are not methods of the user's class.
        if method.startswith("_") or not callable(getattr(self._cls, method, None)):
            raise AttributeError(f"The class on the devices has no public method {method!r}.")
        return _Method(functools.partial(self._start, method))

    def _start(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        check_method(self._cls, method, args, kwargs)
        payload = ray.put((None, args, kwargs))
        calls = [actor.invoke.remote(method, [payload]) for actor in self._actors]
        return arrange(calls, self._slots, self._pool.config.flatten)

    def close(self) -> None:
        """End the instances, and give their slices back. Can be repeated."""
        if not self._is_open:
            return
        self._is_open = False
        # If Ray has ended, so have they, and `ray.kill` would start another Ray.
        if self._made_on == extension.connection():
            for actor in self._actors:
                ray.kill(actor)
        self._claim.release()
        self._pool.close()


@dataclass(frozen=True)
class _Method:
    """A method of all instances. Arguments that it does not take are a TypeError, and nothing is called."""

    remote: Callable[..., list[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method on every instance, and return its results in the order of the hosts."""
        return [ray.get(part) for part in self.remote(*args, **kwargs)]


class DeviceDecorator(Protocol):
    """Makes a `DeviceClass` of a class, and a `DeviceFunction` of a function."""

    @overload
    def __call__(self, target: Class, /) -> DeviceClass: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, target: Function, /) -> DeviceFunction: ...


def device_remote(
    *misplaced: Never, accelerator_config: AcceleratorConfigType | None = None, flatten: bool = True
) -> DeviceDecorator:
    """Decorate a function, which gives a `DeviceFunction`, or a class, which gives a `DeviceClass`.

    Args:
        misplaced: nothing is passed by position.
        accelerator_config: what to run on. Its budgets for retries do not apply, because each call runs once.
        flatten: return one list of values or references instead of one list per slice.

    Raises:
        TypeError, ValueError: here or by the decorator: the target cannot be run. Nothing is reserved before its use.
    """
    if misplaced or accelerator_config is None:
        raise TypeError(
            "The decorator needs what to run on, by keyword: "
            "@device_remote(accelerator_config=TpuAcceleratorConfig('v4-16'))."
        )
    config = replace(accelerator_config, flatten=flatten, max_retries_failure=0, max_retries_preemption=0)

    def decorate(target: Any) -> Any:
        return (DeviceClass if isinstance(unwrap_remote(target)[0], type) else DeviceFunction)(target, config)

    return decorate


tpu_remote = device_remote
