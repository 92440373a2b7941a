# SPDX-License-Identifier: Apache-2.0
"""The futures of classic calls and plain ObjectRefs, and the fetching of their results."""

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import RayError

from .._membership.core import Core
from .._membership.losses import diagnose
from .._observe.query import late_workers
from .._ray_private import end_of, is_stream
from .._transport import replies
from .._transport.replies import REPORT_EVERY_S, short_traceback, task_of
from .._transport.wait import drain
from .._world import Deadline
from ..exceptions import CallTimeoutError
from .plan import split_positions

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
            return fetch_bundle(self, group=None, proxies=return_generators_as_proxies)


def fetch_bundle(future: MultiWorkerFuture, *, group: "ClassicFutures | None", proxies: bool) -> list[Any]:
    """Return the wanted results of a bundle of futures, as `fetch` does."""
    called = range(len(future.futures)) if future.called_workers is None else future.called_workers
    wanted, others = split_positions(called, future.return_from_workers)
    silent = [future.futures[at] for at in others]
    return fetch([future.futures[at] for at in wanted], silent=silent, group=group, proxies=proxies)


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

    def name_of(self, futures: Sequence[Any]) -> str:
        """Return the name of the method that some futures are of; "" if it is unknown."""
        return next((made[0] for one in futures if (made := self._made.get(task_of(one))) is not None), "")

    def remove(self, futures: Sequence[Any]) -> None:
        """Forget futures whose results have been fetched."""
        for future in futures:
            self._made.pop(task_of(future), None)

    def has_any_of(self, actor_id: str) -> bool:
        """Return whether an actor has futures that the group has not fetched: then its user fetches them."""
        return any(task.hex().endswith(actor_id) for task in list(self._made))  # other threads make calls

    def first_deadline(self, futures: Sequence[Any], otherwise: float) -> Deadline:
        """Return the first deadline of some futures; the time of unknown futures is `otherwise`."""
        limit = self.core.call_timeout_s
        if limit is None or not futures:
            return Deadline()
        return Deadline(min(self._made.get(task_of(future), ("", otherwise))[1] for future in futures) + limit)

    def late_error(self, pending: Sequence[ObjectRef], called: int, otherwise: float) -> CallTimeoutError:
        """Return the error that names the workers that have not finished the calls behind these refs."""
        method, began = min(
            (self._made.get(task_of(ref), ("a method", otherwise)) for ref in pending), key=lambda made: made[1]
        )
        workers = {one.rank: one for ref in pending if (one := self.core.find(replies.actor_of(ref))) is not None}
        late = late_workers([workers[rank] for rank in sorted(workers)])
        return CallTimeoutError(method, time.monotonic() - began, called, late)


def fetch(
    futures: Sequence[Any], *, silent: Sequence[Any] = (), group: ClassicFutures | None = None, proxies: bool = False
) -> list[Any]:
    """Return the values of futures in order; a generator gives one value for each item, or with `proxies` itself.

    The `silent` futures are waited for and not fetched. With a group, its timeout holds, and errors name ranks.
    """
    core = None if group is None else group.core
    if core is not None:
        core.connection.check()
    for future in futures:
        if not isinstance(future, (ObjectRef, ObjectRefGenerator)):
            raise TypeError(f"expected an ObjectRef or a generator of them, got {type(future).__name__}")
    generators = [] if proxies else [future for future in futures if is_stream(future)]
    streams = {generator: _items_before_deadline.pop(generator, []) for generator in generators}
    # The silent ones hold None: fetching them moves nothing, and raises their errors.
    waited_for = [future for future in silent if not is_stream(future)]
    singles = [*(future for future in futures if not is_stream(future)), *waited_for]
    wait = _Wait(group, [*streams, *singles])
    refs: list[ObjectRef] = []
    try:
        if streams:
            drain({**streams, **dict.fromkeys(singles)}, lambda: wait.deadline, wait.check_late)
        slots = [slot for future in futures for slot in streams.get(future, [future])]
        refs = [slot for slot in slots if not is_stream(slot)]
        values = replies.values([*refs, *waited_for], wait.deadline, wait.check_late)[: len(refs)]
    except CallTimeoutError:
        _items_before_deadline.update(streams)
        raise
    except RayError as error:  # every exception of a worker
        ends = [*(generator.completed() for generator in streams), *(items[-1] for items in streams.values() if items)]
        raise diagnose(list(dict.fromkeys([*singles, *ends])), error, core, group.name_of(futures) if group else "")  # noqa: B904  chained there
    if group is not None:
        group.remove([*streams, *singles])
    left = iter(values)
    return [slot if is_stream(slot) else next(left) for slot in slots]


# Items that were taken from generators before a deadline passed. The next attempt returns them too.
_items_before_deadline: weakref.WeakKeyDictionary[ObjectRefGenerator, list[ObjectRef]] = weakref.WeakKeyDictionary()


class _Wait:
    """One wait for futures that were made at different times, each with its own deadline."""

    def __init__(self, group: ClassicFutures | None, futures: Sequence[Any]) -> None:
        self._group = group
        self._futures = futures
        self._began = time.monotonic()
        self._report = Deadline.after(REPORT_EVERY_S)
        self.deadline = self._first_deadline(futures)

    def check_late(self, _: Deadline) -> Deadline:
        """Return the first deadline of the futures that are not ready; log them every `REPORT_EVERY_S` seconds."""
        ends = {end_of(future): future for future in self._futures}
        pending = replies.wait(list(ends))[1]
        self.deadline = self._first_deadline([ends[ref] for ref in pending])
        if self._group is not None and pending:
            if self.deadline.passed:
                raise self._group.late_error(pending, len(ends), self._began)
            if self._report.passed:
                self._report = Deadline.after(REPORT_EVERY_S)
                logger.warning("%s", self._group.late_error(pending, len(ends), self._began))
        return self.deadline

    def _first_deadline(self, futures: Sequence[Any]) -> Deadline:
        return Deadline() if self._group is None else self._group.first_deadline(futures, self._began)
