# SPDX-License-Identifier: Apache-2.0
"""Waits for the futures of requests: for Ray's own, and for answers that other transports carry."""

from collections.abc import Sequence
from typing import Any

from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import GetTimeoutError

from .._deadline import Deadline
from .._ray_private import object_sizes, task_of_ref
from .._world import world
from .messages import Carrier, Message, MessageStream

# How long one kind of future is waited for before the other kind is looked at, if a wait has both.
TURN_S = 0.005


def is_stream(future: Any) -> bool:
    """Return whether a future is that of a generator method."""
    return isinstance(future, (ObjectRefGenerator, MessageStream))


def is_message(future: Any) -> bool:
    """Return whether a transport other than Ray carries the answer."""
    return isinstance(future, (Message, MessageStream))


def task_of_future(future: Any) -> bytes:
    """Return the id of the task that creates an object, or the items of a generator."""
    if isinstance(future, Message):
        return future.task
    return task_of_ref(future if isinstance(future, ObjectRef) else end_of(future))


def wait(
    futures: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    """Return which futures are ready and which are not, as `ray.wait` does."""
    carriers = list(dict.fromkeys(_carrier(future) for future in futures if is_message(future)))
    if not carriers:
        return world().wait(futures, num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)
    of_ray = [future for future in futures if not is_message(future)]
    messages = [future for future in futures if is_message(future)]
    deadline = Deadline.after(timeout)
    ready: set[Any] = set()
    left = list(messages)

    def is_enough() -> bool:
        if num_returns == len(futures):
            while left and left[-1].done:
                left.pop()
            return not left
        return sum(1 for future in messages if future.done) + len(ready) >= num_returns

    while True:
        if of_ray:
            ready = set(world().wait(of_ray, num_returns=len(of_ray), timeout=0, fetch_local=fetch_local)[0])
        turn_s = None if len(carriers) == 1 and not of_ray else TURN_S
        for carrier in carriers:
            carrier.run(is_enough, deadline.left(turn_s))
        done = [one for one in futures if (one in ready if not is_message(one) else one.done)]
        if len(done) >= num_returns or deadline.passed:
            chosen = set(done[:num_returns])
            return done[:num_returns], [one for one in futures if one not in chosen]


def get(futures: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Return the values of futures, or raise the first error that arrives, as `ray.get` does."""
    if Message not in map(type, futures):
        return world().get(futures, timeout=timeout)
    messages = [future for future in futures if isinstance(future, Message)]
    deadline = Deadline.after(timeout)
    waiting = list(messages)
    carriers = list({future.carrier for future in messages})
    alone = len(carriers) == 1
    failures, has_failed = -1, False

    def is_enough() -> bool:
        nonlocal failures, has_failed
        while waiting and waiting[-1].done and not waiting[-1].failed:
            waiting.pop()
        # This runs after each message, and must not look at all futures each time.
        now = carriers[0].failures if alone else sum(carrier.failures for carrier in carriers)
        if failures != now:
            failures, has_failed = now, any(future.failed for future in waiting)
        return has_failed or not waiting

    while True:
        for carrier in carriers:
            carrier.run(is_enough, deadline.left(None if alone else TURN_S))
        if alone or is_enough() or deadline.passed:
            break
    for future in waiting:
        if future.failed:
            future.get()
    if waiting:
        raise GetTimeoutError(f"Get timed out: some answers have not arrived within {timeout} s.")
    if len(messages) == len(futures):
        return [future.get() for future in messages]
    of_ray = [future for future in futures if not is_message(future)]
    fetched = iter(world().get(of_ray, timeout=deadline.left()))
    return [future.get() if is_message(future) else next(fetched) for future in futures]


def get_one(future: Any) -> Any:
    """Return the value of a future, or raise its error."""
    return get([future])[0]


def end_of(future: Any) -> Any:
    """Return the future that is ready when a worker has finished: the value itself, or the end of a generator."""
    return future.completed() if is_stream(future) else future


def sum_sizes(results: Sequence[Any]) -> int:
    """Return the bytes of fetched results, as sent."""
    of_ray = [one for one in results if not isinstance(one, Message)]
    return sum(one.size() for one in results if isinstance(one, Message)) + sum(object_sizes(of_ray))


def _carrier(future: Any) -> Carrier:
    carrier: Carrier = future.completed().carrier if isinstance(future, MessageStream) else future.carrier
    return carrier
