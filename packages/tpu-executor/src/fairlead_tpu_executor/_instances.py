# SPDX-License-Identifier: Apache-2.0
"""Instances of a class on every host of slices: their methods return values, or references by `.remote(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from fairlead_placement.spi import SlotClaim

from ._pool import SlicePool, arranged

__all__ = ["DeviceInstances"]


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
        pool: SlicePool,
        give_back: Callable[[], object] | None = None,
    ) -> None:
        self._cls, self._actors, self._claim, self._pool = cls, actors, claim, pool
        self._give_back = give_back

    def __getattr__(self, method: str) -> _Method:
        if method.startswith("_") or not callable(getattr(self._cls, method, None)):
            raise AttributeError(f"{getattr(self._cls, '__name__', self._cls)} has no public method {method!r}")
        return _Method(self._actors, method, self._pool)

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

    def __enter__(self) -> DeviceInstances:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method:
    """A method of all instances."""

    def __init__(self, actors: list[list[Any]], method: str, pool: SlicePool) -> None:
        self._actors, self._method, self._pool = actors, method, pool

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it on every instance, and return what it returns, in the order of the hosts.

        Raises:
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`.
            Exception: what the method raised, or Ray's error of a host that was lost; the first in that order.
        """
        return self._pool.get(self._called(args, kwargs))

    def remote(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it on every instance; references to what it returns, in the order of the hosts."""
        return arranged(self._called(args, kwargs), self._pool.config.flatten)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
        payload = ray.put((None, args, kwargs))
        return [[actor.invoke.remote(self._method, [payload]) for actor in of_slice] for of_slice in self._actors]
