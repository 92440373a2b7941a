# SPDX-License-Identifier: Apache-2.0
"""A ledger in a Ray actor, for generators and a trainer in different processes. It needs the extra `ray`."""

import functools
from collections.abc import Callable
from typing import Any

import ray

from ._async import AsyncLedger
from ._ledger import Ledger

__all__ = ["LedgerHandle", "start_ledger"]


class LedgerHost:
    """The object in the actor. Its methods run on one event loop, one after the other between their waits."""

    def __init__(self, make: Callable[[], Ledger]) -> None:
        self._waiting = AsyncLedger(make())

    async def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method of the ledger; `lease` and `claim` may wait."""
        target = self._waiting if method in ("lease", "claim") else self._waiting.ledger
        result = getattr(target, method)(*arguments, **options)
        return await result if target is self._waiting else result


class LedgerHandle:
    """The ledger of an actor. It can be passed to tasks and actors.

    It has the methods of `AsyncLedger` and `Ledger`, and each returns an `ObjectRef` of the result. Give leases a
    deadline, such as `time.time() + 600`, and have one process call `expire(time.time())` now and then: leases of a
    process that has died go to others. Bound a wait by `timeout_s`, because a request continues after a timeout of
    `ray.get`, and takes groups that the caller does not see. Ray keeps no order of requests to this actor, so fetch the
    result of a request before you make another one that relies on it, such as `claim` after `advance`.

    >>> import ray  # doctest: +SKIP
    >>> ledger = start_ledger(lambda: Ledger(config, IndexStream(1000, seed=0)))  # doctest: +SKIP
    >>> leases = ray.get(ledger.lease(8, timeout_s=60.0))  # doctest: +SKIP
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call any method of the ledger by its name."""
        return self._actor.call.remote(method, arguments, options)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):  # pickle looks for some
            raise AttributeError(method)
        return functools.partial(self.call, method)


def start_ledger(make: Callable[[], Ledger], *, name: str | None = None) -> LedgerHandle:
    """Start an actor with a ledger and return its handle.

    The actor needs no CPU, ends with the job, and is not restarted: after a crash, start another one whose `make` calls
    `Ledger.restore`.

    Args:
        make: makes the ledger, in the actor.
        name: of the actor, for `ray.get_actor`.

    Returns:
        A handle, before the ledger is made; the first call waits for it.
    """
    actor_class: Any = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=10_000)(LedgerHost)
    return LedgerHandle(actor_class.options(name=name).remote(make))
