# SPDX-License-Identifier: Apache-2.0
"""The futures of classic calls and plain ObjectRefs, and the fetching of their results."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import RayError

from .. import _world
from .._membership.core import Core
from .._membership.losses import diagnose
from .._ray_private import is_stream
from .._transport import replies, wait
from .._transport.replies import short_traceback, task_of
from .._world import NEVER, Deadline
from .arrivals import check_late
from .plan import Recipients

logger = logging.getLogger(__name__)

# The number of futures of classic calls whose start is remembered: the latest ones.
MOST_SUBMITTED = 10_000


class ResultFetcher(Protocol):
    """A group, as far as it fetches results."""

    def get_all_worker_results(
        self, future_bundle: "MultiWorkerFuture | Sequence[Any]", return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Fetch results; see `RayWorkerGroup`."""


@dataclass
class MultiWorkerFuture:
    """The futures of one call to several workers; compatible with NeMo RL.

    Attributes:
        futures: one future for each called worker. The future of a worker that does not return a result holds None.
        return_from_workers: the ranks whose results are wanted, in this order; None for all futures. Ranks that were
            not called have none, and are left out.
        called_workers: the rank of each future; None if future i belongs to rank i.

    Raises:
        ValueError: a rank is called twice, or the numbers of ranks and futures differ.

    >>> MultiWorkerFuture(["a", "b"], called_workers=[0, 0])
    Traceback (most recent call last):
    ValueError: called_workers names a rank twice: [0, 0]
    """

    futures: list[Any]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None

    def __post_init__(self) -> None:
        if self.called_workers is not None and len(self.called_workers) != len(self.futures):
            raise ValueError(f"{len(self.futures)} futures, but {len(self.called_workers)} called_workers")
        if len(set(self.called_workers or ())) != len(self.called_workers or ()):
            raise ValueError(f"called_workers names a rank twice: {self.called_workers}")

    def get_results(
        self, worker_group: ResultFetcher | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait for the workers and fetch the wanted results, and nothing else.

        Waits for every called worker, because the errors of a worker that returns no result count too.

        Args:
            worker_group: the group that was called; with it, errors name the ranks that failed.
            return_generators_as_proxies: return each generator as it is, an iterator of ObjectRefs.

        Returns:
            The results in the order of `return_from_workers`. The items of a generator stand at its place.

        Raises:
            CallTimeoutError: a worker has not finished by the `Timeouts.call_s` of `worker_group`, which counts from
                the call; for ObjectRefs that the group did not make, from now.
            WorkerFailureError: a worker was lost.
            Exception: a worker's own exception, with its type and notes that name the failing ranks.
        """
        if worker_group is not None:
            return worker_group.get_all_worker_results(self, return_generators_as_proxies)
        with short_traceback():
            return fetch(self, group=None, proxies=return_generators_as_proxies)


class ClassicFutures:
    """The futures that classic calls of a group have returned, with the times at which they were made.

    ObjectRefs have no time, and the deadline of a call counts from the call.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._made: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def add(self, futures: Sequence[Any], method: str, began: float) -> None:
        """Remember the futures of a call."""
        self._made.update((task_of(future), (method, began)) for future in futures)
        while len(self._made) > MOST_SUBMITTED:
            self._made.popitem(last=False)

    def remove(self, futures: Sequence[Any]) -> None:
        """Forget futures whose results have been fetched."""
        for future in futures:
            self._made.pop(task_of(future), None)

    def has_any_of(self, actor_id: str) -> bool:
        """Return whether an actor has futures that the group has not fetched: then its user fetches them."""
        return any(task.hex().endswith(actor_id) for task in list(self._made))  # other threads make calls

    def find_last(self, futures: Sequence[Any]) -> tuple[str, float]:
        """Return the method and the time of the last call that some futures are of: "" and now for other futures."""
        unknown = "", _world.current.now()
        return max((self._made.get(task_of(future), unknown) for future in futures), key=lambda made: made[1])


def fetch(bundle: MultiWorkerFuture, *, group: ClassicFutures | None, proxies: bool) -> list[Any]:
    """Return the wanted values in order; a generator gives one value for each item, or with `proxies` itself.

    The other futures are waited for and not fetched. With a group, its timeout holds, and errors name ranks.
    """
    core = None if group is None else group.core
    if core is not None:
        core.connection.check()
    called = range(len(bundle.futures)) if bundle.called_workers is None else bundle.called_workers
    wanted, others = Recipients(
        list(called), list(called if bundle.return_from_workers is None else bundle.return_from_workers), None
    ).positions
    futures, silent = ([bundle.futures[at] for at in positions] for positions in (wanted, others))
    for future in futures:
        if not isinstance(future, (ObjectRef, ObjectRefGenerator)):
            raise TypeError(f"expected an ObjectRef or a generator of them, got {type(future).__name__}")
    asked = [future for future in futures if not (proxies and is_stream(future))]
    # The silent ones hold None: fetching them moves nothing, and raises their errors.
    waited_for = [*asked, *(future for future in silent if not is_stream(future))]
    if not waited_for:
        return list(futures)
    method, deadline, check = "", NEVER, None
    if group is not None:
        method, began = group.find_last(waited_for)
        limit_s = group.core.call_timeout_s
        deadline = NEVER if limit_s is None else Deadline(began + limit_s)
        check = partial(check_late, group.core, method or "a method", began, waited_for)
    try:
        if any(map(is_stream, asked)):
            wait.drain(waited_for, deadline, check or (lambda deadline: deadline))
        refs = [ref for future in asked for ref in (wait.taken(future) if is_stream(future) else [future])]
        values = iter(replies.values([*refs, *waited_for[len(asked) :]], deadline, check))
    except RayError as error:  # every exception of a worker
        raise diagnose(wait.ends_of(waited_for), error, core, method)  # noqa: B904  chained there
    if group is not None:
        group.remove(waited_for)
    results = []
    for future in futures:
        if is_stream(future):
            results += [future] if proxies else [next(values) for _ in wait.taken(future)]
        else:
            results.append(next(values))
    return results
