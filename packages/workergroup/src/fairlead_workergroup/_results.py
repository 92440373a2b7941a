# SPDX-License-Identifier: Apache-2.0
"""What workers answer, and when it is fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef, ObjectRefGenerator

from ._failures import WorkerFacts, as_failures, explained
from ._inspect import gone
from ._ray_private import actor_id_of_ref
from .exceptions import WorkerFailureError

if TYPE_CHECKING:
    from ._group import RayWorkerGroup

__all__ = ["REPORT_EVERY_S", "MultiWorkerFuture", "fetched", "not_here_yet", "positions", "what_failed"]


# Ray knows within a moment that a process has ended.
KNOWN_S = 5.0
# How often a wait without an end says whom it is for.
REPORT_EVERY_S = 60.0


@dataclass
class MultiWorkerFuture:
    """The futures of one call to several workers, and which of them answer.

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
        self, worker_group: RayWorkerGroup | None = None, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Wait for the workers and fetch what was asked for, and nothing else.

        Every called worker is waited for, also those that do not answer: their errors count too. A worker's generator
        gives one result for each item, at its place.

        Args:
            worker_group: the group that was called; with it, errors say who failed.
            return_generators_as_proxies: leave generators as they are: each an iterator of ObjectRefs.

        Raises:
            WorkerFailureError: a worker was lost.
            Exception: a worker's own exception, with its type and notes that name the failing ranks.
            ValueError: `return_from_workers` names a rank that was not called.
        """
        wanted, others = positions(self)
        return fetched(
            [self.futures[at] for at in wanted],
            silent=[self.futures[at] for at in others],
            group=worker_group,
            proxies=return_generators_as_proxies,
        )


def positions(future: MultiWorkerFuture) -> tuple[list[int], list[int]]:
    """Where in its `futures` the wanted answers are, in the order they are wanted; and where the others are.

    Raises:
        ValueError: `return_from_workers` names a rank that was not called.
    """
    called = range(len(future.futures)) if future.called_workers is None else future.called_workers
    if future.return_from_workers is None:
        return list(range(len(called))), []
    index = {rank: at for at, rank in enumerate(called)}
    if unknown := [rank for rank in future.return_from_workers if rank not in index]:
        raise ValueError(f"return_from_workers names ranks {unknown}, which were not called: {sorted(index)}")
    wanted = [index[rank] for rank in future.return_from_workers]
    return wanted, sorted(set(range(len(called))).difference(wanted))


def fetched(
    futures: Sequence[Any], *, silent: Sequence[Any] = (), group: RayWorkerGroup | None = None, proxies: bool = False
) -> list[Any]:
    """The values of futures in order; `silent` ones are waited for and not fetched."""
    if group is not None:
        group._check_connected()
    refs: list[ObjectRef] = []
    slots: list[Any] = []
    for future in futures:
        if isinstance(future, ObjectRefGenerator):
            if proxies:
                slots.append(future)
                continue
            new = list(_streamed(future, group))
        elif isinstance(future, ObjectRef):
            new = [future]
        else:
            raise TypeError(f"expected an ObjectRef or a generator of them, got {type(future).__name__}")
        slots.extend([_AT] * len(new))
        refs.extend(new)
    waited_for = [ref for ref in silent if isinstance(ref, ObjectRef)]
    try:
        # Those that do not answer hold None: fetching them moves nothing, and surfaces their errors.
        values = iter(ray.get([*refs, *waited_for])[: len(refs)])
    except Exception as error:  # noqa: BLE001  whatever a worker raised
        raise what_failed([*refs, *waited_for], error, group)  # noqa: B904  chained there
    if group is not None:
        group._count_fetched(refs)
    return [next(values) if slot is _AT else slot for slot in slots]


_AT = object()


def _streamed(generator: ObjectRefGenerator, group: RayWorkerGroup | None) -> Iterator[ObjectRef]:
    try:
        yield from generator
        # A stream that is cut off by the worker's end just stops.
        ray.get(generator.completed())
    except Exception as error:  # noqa: BLE001  whatever a worker raised
        raise what_failed([generator.completed()], error, group)  # noqa: B904  chained there


def what_failed(refs: Sequence[ObjectRef], first: BaseException, group: RayWorkerGroup | None) -> BaseException:
    """The exception to raise for a fetch that failed: of all ranks that have failed by now."""
    if group is None:
        return first
    known = group._facts_by_actor()
    done = _finished(refs, first, known)
    failed: dict[int, BaseException] = {}
    who: dict[int, WorkerFacts] = {}
    for ref in done:
        worker = known.get(actor_id_of_ref(ref))
        if worker is None:
            continue
        try:
            ray.get(ref, timeout=0)
        except Exception as error:  # noqa: BLE001  whatever a worker raised
            if not not_here_yet(error):
                failed.setdefault(worker.rank, error)
                who[worker.rank] = worker
    if not failed:
        return first
    errors = dict(sorted(failed.items()))
    if lost := as_failures(errors, who):
        noted = group._note_lost(lost)
        told = WorkerFailureError(noted, group._remedy(noted))
        told.__cause__ = next(iter(errors.values()))
        return told
    return explained(errors, who)


def _finished(refs: Sequence[ObjectRef], first: BaseException, known: Mapping[str, WorkerFacts]) -> list[ObjectRef]:
    """The refs whose workers have finished or failed, those included whose process has ended a moment ago.

    When a worker dies, those that talk to it fail too, and may be heard of before Ray knows of the death.
    """
    if not refs:
        return []
    done: list[ObjectRef]
    done, pending = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
    if pending and isinstance(first, ray.exceptions.RayTaskError):
        waiting = {ref: known[actor] for ref in pending if (actor := actor_id_of_ref(ref)) in known}
        dying = [ref for ref, ended in zip(waiting, gone(list(waiting.values())), strict=True) if ended]
        if dying:
            more, _ = ray.wait(dying, num_returns=len(dying), timeout=KNOWN_S, fetch_local=False)
            done += more
    return done


def not_here_yet(error: BaseException) -> bool:
    """Whether Ray itself ran out of time; a worker's own GetTimeoutError comes as a RayTaskError too."""
    return isinstance(error, ray.exceptions.GetTimeoutError) and not isinstance(error, ray.exceptions.RayTaskError)
