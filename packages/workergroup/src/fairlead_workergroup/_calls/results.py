# SPDX-License-Identifier: Apache-2.0
"""What workers answer, and when it is fetched."""

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import ObjectRef, ObjectRefGenerator

from .._deadline import Deadline
from .._members import Roster, WorkerFacts
from .._observe.failures import as_failures, explain_errors
from .._observe.query import find_ended
from .._ray_private import actor_id_of_ref, task_of_future, task_of_ref
from ..exceptions import CallTimeoutError
from .errors import retrieve_late, short_traceback
from .sender import Sender

logger = logging.getLogger(__name__)

# Ray knows within a moment that a process has ended.
KNOWN_S = 5.0
# A generator that is always ready must not keep the others waiting.
MOST_IN_A_TURN = 100
# How often a wait without an end says whom it is for.
REPORT_EVERY_S = 60.0


# Futures of classic calls whose start is remembered: the latest ones.
MOST_SUBMITTED = 10_000


class ResultFetcher(Protocol):
    """A group, as far as it fetches results."""

    def get_all_worker_results(
        self, future_bundle: "MultiWorkerFuture | Sequence[Any]", return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """See `RayWorkerGroup`."""


@dataclass
class MultiWorkerFuture:
    """The futures of one call to several workers, and which of them answer; compatible with the original system.

    Attributes:
        futures: one for each called worker. That of a worker that does not answer holds None.
        return_from_workers: ranks whose results are wanted, in the order they are wanted; None for all futures.
        called_workers: rank of each future; None if future i is rank i's.

    Raises:
        ValueError: a rank is called twice, or there is not one rank per future.

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
        """Wait for the workers and fetch what was asked for, and nothing else.

        Every called worker is waited for, also those that do not answer: their errors count too. A worker's generator
        gives one result for each item, at its place.

        Args:
            worker_group: the group that was called; with it, errors say who failed.
            return_generators_as_proxies: leave generators as they are: each an iterator of ObjectRefs.

        Raises:
            CallTimeoutError: a worker has not finished by the `call_timeout_s` of `worker_group`, which counts from
                the call; for ObjectRefs that the group did not make, from now.
            WorkerFailureError: a worker was lost.
            Exception: a worker's own exception, with its type and notes that name the failing ranks.
            ValueError: `return_from_workers` names a rank that was not called.
        """
        if worker_group is not None:
            return worker_group.get_all_worker_results(self, return_generators_as_proxies)
        with short_traceback():
            return fetch_bundle(self, group=None, proxies=return_generators_as_proxies)


def fetch_bundle(future: MultiWorkerFuture, *, group: "ClassicFutures | None", proxies: bool) -> list[Any]:
    """Return the wanted results of a bundle of futures, as `fetch` does."""
    called = range(len(future.futures)) if future.called_workers is None else future.called_workers
    wanted, others = positions(called, future.return_from_workers)
    return fetch(
        [future.futures[at] for at in wanted],
        silent=[future.futures[at] for at in others],
        group=group,
        proxies=proxies,
    )


class ClassicFutures:
    """The futures that classic calls of a group have handed out, and when they were made.

    ObjectRefs do not say when they were made, and the deadline of a call counts from then.

    Args:
        sender: of the group.

    Attributes:
        sender: as given.
    """

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self._made: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def note(self, futures: Sequence[Any], method: str, began: float) -> None:
        """Note the futures of a call."""
        for future in futures:
            self._made[task_of_future(future)] = (method, began)
        while len(self._made) > MOST_SUBMITTED:
            self._made.popitem(last=False)

    def forget(self, futures: Sequence[Any]) -> None:
        """Forget futures that have been fetched."""
        for future in futures:
            self._made.pop(task_of_future(future), None)

    def first_deadline(self, futures: Sequence[Any], otherwise: float) -> Deadline:
        """Return the first deadline of futures; those that are not known count from `otherwise`."""
        limit = self.sender.call_timeout_s
        if limit is None or not futures:
            return Deadline()
        return Deadline(min(self._made.get(task_of_future(future), ("", otherwise))[1] for future in futures) + limit)

    def late_error(self, pending: Sequence[ObjectRef], called: int, otherwise: float) -> CallTimeoutError:
        """Return the error that names the workers that have not finished the calls behind these refs."""
        method, began = min(
            (self._made.get(task_of_ref(ref), ("a method", otherwise)) for ref in pending), key=lambda one: one[1]
        )
        found = [self.sender.roster.find(actor_id_of_ref(ref)) for ref in pending]
        late = self.sender.late_workers(sorted({facts.rank for facts in found if facts is not None}))
        return CallTimeoutError(method, time.monotonic() - began, called, late)


def positions(called: Sequence[int], returned: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Return where the futures of the wanted answers are, in the order they are wanted, and where the others are.

    Args:
        called: the rank of each future.
        returned: the wanted ranks, in order; None for all.

    Raises:
        ValueError: `returned` names a rank that was not called.
    """
    if returned is None:
        return list(range(len(called))), []
    index = {rank: at for at, rank in enumerate(called)}
    if unknown := [rank for rank in returned if rank not in index]:
        raise ValueError(f"return_from_workers names ranks {unknown}, which were not called: {sorted(index)}")
    wanted = [index[rank] for rank in returned]
    return wanted, sorted(set(range(len(called))).difference(wanted))


def fetch(
    futures: Sequence[Any], *, silent: Sequence[Any] = (), group: ClassicFutures | None = None, proxies: bool = False
) -> list[Any]:
    """Return the values of futures in order.

    Args:
        futures: ObjectRefs, or generators of them; a generator gives one value for each item, at its place.
        silent: futures that are waited for and not fetched.
        group: the group whose workers make them. Its `call_timeout_s` holds, and errors name ranks.
        proxies: return generators as they are.

    Raises:
        TypeError: a future is neither an ObjectRef nor a generator.
        CallTimeoutError: a worker has not finished by the group's `call_timeout_s`.
        WorkerFailureError, Exception: as of `MultiWorkerFuture.get_results`.
    """
    if group is not None:
        group.sender.roster.check_connected()
    for future in futures:
        if not isinstance(future, (ObjectRef, ObjectRefGenerator)):
            raise TypeError(f"expected an ObjectRef or a generator of them, got {type(future).__name__}")
    generators = [] if proxies else [future for future in futures if isinstance(future, ObjectRefGenerator)]
    streams = {generator: _taken.pop(generator, []) for generator in generators}
    singles = [future for future in (*futures, *silent) if isinstance(future, ObjectRef)]
    wait = _Wait(group, [*streams, *singles])
    refs = singles
    try:
        if streams:
            drain(streams, singles, wait.until_some_are_ready)
        refs = [ref for future in futures for ref in streams.get(future, [future])]
        refs = [ref for ref in refs if isinstance(ref, ObjectRef)]
        # Those that do not answer hold None: fetching them moves nothing, and surfaces their errors.
        waited_for = [future for future in silent if isinstance(future, ObjectRef)]
        values = iter(wait.values([*refs, *waited_for])[: len(refs)])
    except CallTimeoutError:
        _taken.update(streams)
        raise
    except Exception as error:  # noqa: BLE001  whatever a worker raised
        ends = [*(generator.completed() for generator in streams), *(items[-1] for items in streams.values() if items)]
        sender = None if group is None else group.sender
        failure = explain_failure(list(dict.fromkeys([*singles, *ends])), error, sender)
        retrieve_late(dict.fromkeys(singles), wait)
        raise failure  # noqa: B904  chained there
    if group is not None:
        group.forget([*streams, *singles])
        group.sender.counters.add_fetched(refs)
    slots = [slot for future in futures for slot in streams.get(future, [future])]
    return [next(values) if isinstance(slot, ObjectRef) else slot for slot in slots]


# Items that were taken from generators before a deadline passed. The next attempt returns them too.
_taken: weakref.WeakKeyDictionary[ObjectRefGenerator, list[ObjectRef]] = weakref.WeakKeyDictionary()


def drain(
    streams: Mapping[ObjectRefGenerator, list[ObjectRef]],
    singles: Sequence[ObjectRef],
    until_some_are_ready: Callable[[list[Any]], list[Any]],
) -> None:
    """Take the items of generators as they arrive, of all generators in turn, until every generator has ended.

    Args:
        streams: the list to which the items of each generator are added.
        singles: other results of the same call; the error of one ends the wait.
        until_some_are_ready: waits, and returns those of the futures given that are ready.

    Raises:
        Exception: what a worker raised, as Ray raises it, or what `until_some_are_ready` raises.
    """
    waiting: dict[Any, None] = dict.fromkeys([*streams, *singles])
    while waiting:
        for future in until_some_are_ready(list(waiting)):
            if isinstance(future, ObjectRef):
                del waiting[future]
                ray.get(future)
                continue
            items = streams[future]
            for _ in range(MOST_IN_A_TURN):
                if (ref := next(future, None)) is None:
                    del waiting[future]
                    # A generator that raises gives its error as its last item; if its worker died, its completion.
                    ray.get([*items[-1:], future.completed()])
                    break
                items.append(ref)
                if not future.next_ready():
                    break


class _Wait:
    """One wait for futures that were made at different times, each with a deadline of its own."""

    def __init__(self, group: ClassicFutures | None, futures: Sequence[Any]) -> None:
        self._group = group
        self._futures = futures
        self._began = time.monotonic()
        self._report = Deadline.after(REPORT_EVERY_S)
        self._deadline = self._first_deadline(futures)

    def until_some_are_ready(self, futures: list[Any]) -> list[Any]:
        """Return the futures that are ready, once there is one.

        Raises:
            CallTimeoutError: the deadline of one that is not ready has passed.
        """
        while True:
            left = self._deadline.left(at_most=REPORT_EVERY_S)
            ready, _ = ray.wait(futures, num_returns=1, timeout=left, fetch_local=False)
            if ready:
                if self._deadline.passed:
                    self._check_late()
                more, _ = ray.wait(futures, num_returns=len(futures), timeout=0, fetch_local=False)
                return list(dict.fromkeys([*ready, *more]))
            self._check_late()

    def values(self, refs: list[ObjectRef]) -> list[Any]:
        """Return the values of refs; moving them here is not counted against the deadline.

        Raises:
            CallTimeoutError: the deadline of one that is not ready has passed.
        """
        while True:
            try:
                values: list[Any] = ray.get(refs, timeout=self._deadline.left(at_most=REPORT_EVERY_S))
                return values
            except Exception as error:
                if not is_not_ready(error):
                    raise
            self._check_late()

    def _check_late(self) -> None:
        ends = {one.completed() if isinstance(one, ObjectRefGenerator) else one: one for one in self._futures}
        _, pending = ray.wait(list(ends), num_returns=len(ends), timeout=0, fetch_local=False)
        self._deadline = self._first_deadline([ends[ref] for ref in pending])
        if self._group is None or not pending:
            return
        if self._deadline.passed:
            raise self._group.late_error(pending, len(ends), self._began)
        if self._report.passed:
            self._report = Deadline.after(REPORT_EVERY_S)
            logger.warning("%s", self._group.late_error(pending, len(ends), self._began))

    def _first_deadline(self, futures: Sequence[Any]) -> Deadline:
        return Deadline() if self._group is None else self._group.first_deadline(futures, self._began)


def explain_failure(refs: Sequence[ObjectRef], first: BaseException, sender: Sender | None) -> BaseException:
    """Return the exception to raise for a fetch that failed, with all ranks that have failed by now.

    Args:
        refs: results of one fetch.
        first: what Ray raised.
        sender: of the group whose workers make the results; None if that is not known.
    """
    if isinstance(first, ray.exceptions.RayError):
        first.__traceback__ = None  # Ray's frames and ours: the traceback in the worker is in the text
    if sender is None:
        return first
    roster = sender.roster
    done = _finished(refs, first, roster)
    failed: dict[int, BaseException] = {}
    who: dict[int, WorkerFacts] = {}
    for ref in done:
        worker = roster.find(actor_id_of_ref(ref))
        if worker is None:
            continue
        try:
            ray.get(ref, timeout=0)
        except Exception as error:  # noqa: BLE001  whatever a worker raised
            if not is_not_ready(error):
                failed.setdefault(worker.rank, error.with_traceback(None))
                who[worker.rank] = worker
    if not failed:
        return first
    errors = dict(sorted(failed.items()))
    if lost := as_failures(errors, who):
        failure = sender.failure_error(lost)
        failure.__cause__ = next(iter(errors.values()))
        return failure
    return explain_errors(errors, who)


def _finished(refs: Sequence[ObjectRef], first: BaseException, roster: Roster) -> list[ObjectRef]:
    """The refs whose workers have finished or failed, those included whose process has ended a moment ago.

    When a worker dies, those that talk to it fail too, and may be heard of before Ray knows of the death.
    """
    if not refs:
        return []
    done: list[ObjectRef]
    done, pending = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
    if pending and isinstance(first, ray.exceptions.RayTaskError):
        waiting = {ref: who for ref in pending if (who := roster.find(actor_id_of_ref(ref))) is not None}
        dying = [ref for ref, ended in zip(waiting, find_ended(list(waiting.values())), strict=True) if ended]
        if dying:
            more, _ = ray.wait(dying, num_returns=len(dying), timeout=KNOWN_S, fetch_local=False)
            done += more
    return done


def is_not_ready(error: BaseException) -> bool:
    """Whether Ray itself ran out of time; a worker's own GetTimeoutError comes as a RayTaskError too."""
    return isinstance(error, ray.exceptions.GetTimeoutError) and not isinstance(error, ray.exceptions.RayTaskError)
