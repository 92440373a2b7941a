# SPDX-License-Identifier: Apache-2.0
"""How a group sends calls, counts what they cost, and notes which workers they have shown to be lost."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef

from fairlead_placement.spi import never_connect

from .._arguments import Arguments
from .._deadline import Deadline
from .._lifecycle.resources import Held
from .._lifecycle.restart import remedy
from .._observe.failures import WorkerFacts
from .._observe.memory import judge
from .._observe.query import cancelled, late_workers
from .._ray_private import actor_id_of_ref, object_sizes, task_of_future, task_of_ref
from .._start.worker_class import Method, WorkerClass
from ..exceptions import CallTimeoutError, LateWorker, WorkerFailure, WorkerFailureError, WorkerGroupError
from .call import Call
from .execution import Repeats
from .line import Line, on_event_loop
from .plan import Column
from .requests import Request, requests, send
from .statistics import GroupStatistics

if TYPE_CHECKING:
    from .._group import RayWorkerGroup

__all__ = ["Dispatching"]

# Futures of classic calls whose start is remembered: the latest ones.
MOST_SUBMITTED = 10_000


class Dispatching:
    """The part of `RayWorkerGroup` between what is asked of it and its workers."""

    name_prefix: str
    workers: list[Any]
    worker_metadata: list[dict[str, Any]]
    _class: WorkerClass
    _held: Held
    _token: str
    _lock: threading.Lock
    _submitting: threading.RLock
    _line: Line
    _counts: GroupStatistics
    _facts: dict[str, WorkerFacts]
    _workers_now: list[WorkerFacts]
    _lost: dict[int, WorkerFailure]
    _restarting: set[int]
    _restart: Future[list[int]] | None
    _restart_began: float | None
    _start_timeout_s: float
    _restart_on_failure: bool
    _restart_scope: str
    _memory_limit: int | None
    _call_timeout_s: float | None
    _submitted: OrderedDict[bytes, tuple[str, float]]

    def restart_failed_workers(self) -> list[int]:
        """See `RayWorkerGroup`."""
        raise NotImplementedError

    def _has_ended(self) -> WorkerGroupError:
        return WorkerGroupError(f"{self!r}: it has been shut down; make a new group")

    def _living(self) -> list[Any]:
        """The handles, which a restart changes in place; those of a group that another thread shuts down are dead."""
        workers = self.workers
        if not workers:
            raise self._has_ended()
        self._check_connected()
        return workers

    def _check_connected(self) -> None:
        if not self._held.connected:
            raise WorkerGroupError(f"{self!r}: the Ray it was made on has been shut down; make a new group")

    def _remedy(self, lost: Sequence[WorkerFailure]) -> str:
        return remedy(self._of_group, lost)

    def _blocking(self, called: Collection[int]) -> tuple[WorkerFailure, ...]:
        """Return the lost workers that a call has to wait for: those it calls, or any if all restart together."""
        together = self._restart_on_failure and self._restart_scope == "group"
        lost = sorted(self._lost.copy().items())
        return tuple(failure for rank, failure in lost if together or rank in called)

    @property
    def _of_group(self) -> RayWorkerGroup:
        return self  # type: ignore[return-value]

    def _dispatch(
        self,
        method: str | Callable[..., Any] | Method,
        called: list[int],
        args: Sequence[Column],
        kwargs: Mapping[str, Column],
        *,
        returned: list[int],
        answers: list[bool] | None = None,
        timeout_s: float | None = None,
        single: bool = False,
        discard: bool = False,
        retries: int = 0,
        may_wait: bool = True,
    ) -> Call:
        began = time.monotonic()
        self._check_retries(retries)
        found = method if isinstance(method, Method) else self._class.method(method)
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(None if timeout_s is None else began + timeout_s)
        self._check_callable(called)
        stored = Arguments()
        # Before this call's turn: storing a large value must not hold up the calls of other threads.
        asked = requests(len(called), found, args, kwargs, answers=answers, arguments=stored)
        kept = list(asked) if retries else None
        puts, bytes_put = stored.puts, stored.bytes_put
        send_it = self._send_without_blocking if may_wait and on_event_loop() else self._send
        counted = {"calls": 1, "puts": puts, "bytes_put": bytes_put}
        futures = send_it(found.name, called, kept or asked, began, deadline, counted)
        return Call(
            futures,
            called,
            returned,
            group=self._of_group,
            method=found,
            began=began,
            timeout_s=timeout_s,
            single=single,
            discard=discard,
            puts=puts,
            bytes_put=bytes_put,
            repeats=None if kept is None else Repeats(retries, kept),
            sources=stored.sources,
        )

    def _check_retries(self, retries: int) -> None:
        if retries and not self._restart_on_failure:
            raise ValueError(f"retries={retries} needs a group with restart_on_failure=True: nobody would be restarted")

    def _note_submitted(self, call: Call) -> list[Any]:
        """Note when the futures of a classic call were made, which ObjectRefs do not say; return them."""
        for future in call.futures:
            self._submitted[task_of_future(future)] = (call._method.name, call._began)
        while len(self._submitted) > MOST_SUBMITTED:
            self._submitted.popitem(last=False)
        return call.futures

    def _forget_submitted(self, futures: Sequence[Any]) -> None:
        for future in futures:
            self._submitted.pop(task_of_future(future), None)

    def _first_deadline(self, futures: Sequence[Any], otherwise: float) -> Deadline:
        """The first deadline of futures; those that are not known count from `otherwise`."""
        if self._call_timeout_s is None or not futures:
            return Deadline()
        began = min(self._submitted.get(task_of_future(future), ("", otherwise))[1] for future in futures)
        return Deadline(began + self._call_timeout_s)

    def _late_futures(self, pending: Sequence[ObjectRef], called: int, otherwise: float) -> CallTimeoutError:
        """The error that names the workers that have not finished what these refs stand for."""
        method, began = min(
            (self._submitted.get(task_of_ref(ref), ("a method", otherwise)) for ref in pending), key=lambda one: one[1]
        )
        ranks = {self._facts[actor].rank for ref in pending if (actor := actor_id_of_ref(ref)) in self._facts}
        return CallTimeoutError(method, time.monotonic() - began, called, self._late_workers(sorted(ranks)))

    def _check_callable(self, called: Collection[int]) -> list[Any]:
        """Return the workers' handles.

        Raises:
            WorkerFailureError: a worker that the call needs is lost, and the group does not restart it.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        workers = self._living()
        if self._lost and not self._restart_on_failure and (lost := self._blocking(called)):
            raise WorkerFailureError(lost, self._remedy(lost))
        return workers

    @contextlib.contextmanager
    def _turn(self, method: str, called: Collection[int], began: float, deadline: Deadline) -> Iterator[list[Any]]:
        """Keep other threads from sending, once the workers of a call are there; the value is their handles.

        Raises:
            CallTimeoutError: other calls or a restart took longer than the call's deadline.
            WorkerFailureError, WorkerGroupError: as of `_check_callable`, or a restart failed.
        """
        while True:
            if not self._submitting.acquire(timeout=deadline.left(at_most=threading.TIMEOUT_MAX) or 0.0):
                raise self._not_sent(method, called, began)
            try:
                workers = self._check_callable(called)
                lost = self._blocking(called) if self._lost else ()
                if not lost:
                    yield workers
                    return
                if self._restart_began is not None:  # this thread restarts them, and a worker was lost again
                    raise WorkerFailureError(lost, self._remedy(lost))
                if deadline.at is None:
                    self.restart_failed_workers()
                    continue
            finally:
                self._submitting.release()
            # A restart may take longer than this call may wait, and must not be given up half done.
            restart = self._restart_in_background()
            if not wait([restart], timeout=deadline.left(at_most=threading.TIMEOUT_MAX)).done:
                raise self._not_sent(method, called, began)
            restart.result()

    def _restart_in_background(self) -> Future[list[int]]:
        """Return the restart that runs on a thread of its own; start it if there is none."""
        with self._lock:
            if self._restart is None:
                self._restart = Future()
                work = partial(self._run_restart, self._restart)
                threading.Thread(target=work, name="fairlead-restart", daemon=True).start()
            return self._restart

    def _run_restart(self, restart: Future[list[int]]) -> None:
        never_connect()
        try:
            ranks = self.restart_failed_workers()
        except BaseException as error:  # noqa: BLE001  the calls that wait for it raise it
            outcome: Callable[[], None] = partial(restart.set_exception, error)
        else:
            outcome = partial(restart.set_result, ranks)
        with self._lock:
            self._restart = None
        outcome()

    def _not_sent(self, method: str, called: Collection[int], began: float) -> CallTimeoutError:
        now, since = time.monotonic(), self._restart_began
        if since is None:
            reason = "Other calls were being sent, or a restart was about to begin. Make the call again."
        else:
            ranks = f"rank(s) {', '.join(map(str, sorted(self._restarting.copy())))}" if self._restarting else "workers"
            reason = (
                f"A restart of {ranks} has been under way for {now - since:.1f} s and goes on; it may take "
                f"start_timeout_s={self._start_timeout_s:g} s. Make the call again, with a longer timeout."
            )
        return CallTimeoutError(method, now - began, len(called), (), reason)

    def _is_lost(self, ref: ObjectRef) -> bool:
        """Whether what makes an object is dead, or has been replaced."""
        who = self._facts.get(actor_id_of_ref(ref))
        return who is not None and (who.rank in self._lost or self._workers_now[who.rank] is not who)

    def _send(
        self,
        method: str,
        ranks: Sequence[int],
        asked: Iterable[Request],
        began: float,
        deadline: Deadline,
        counted: Mapping[str, int] | None = None,
    ) -> list[Any]:
        """Restart lost workers if that is due, send a request to each rank, and return the futures.

        Args:
            method: the name of the method, for errors.
            ranks: whom to ask.
            asked: what to ask each of them.
            began: when the call was made.
            deadline: when to give up waiting for the turn.
            counted: what it adds to the group's statistics besides the requests.

        Raises:
            CallTimeoutError, WorkerFailureError, WorkerGroupError: as of `_turn`; nothing has been sent.
        """
        with self._turn(method, ranks, began, deadline) as workers:
            futures = [send(workers[rank], request) for rank, request in zip(ranks, asked, strict=True)]
        self._count(requests=len(futures), **(counted or {}))
        return futures

    def _send_without_blocking(
        self,
        method: str,
        ranks: Sequence[int],
        asked: Iterable[Request],
        began: float,
        deadline: Deadline,
        counted: Mapping[str, int],
    ) -> list[Any] | Future[list[Any]]:
        """Do the same on an event loop: a call that has to wait for its turn or a restart is sent by another thread."""
        if not self._line.busy:  # otherwise earlier calls are still waiting
            # It times out at once if another thread is sending or workers have to be restarted.
            with contextlib.suppress(CallTimeoutError):
                return self._send(method, ranks, asked, began, Deadline(time.monotonic()), counted)

        def send_later() -> list[Any]:
            if deadline.passed:
                raise self._not_sent(method, ranks, began)
            return self._send(method, ranks, asked, began, deadline, counted)

        return self._line.add(send_later)

    def _count(self, **more: int) -> None:
        with self._lock:
            counts = {name: getattr(self._counts, name) + amount for name, amount in more.items()}
            self._counts = dataclasses.replace(self._counts, **counts)

    def _count_fetched(self, refs: Sequence[ObjectRef]) -> int:
        size = sum(object_sizes(refs))
        self._count(fetched=len(refs), bytes_fetched=size)
        return size

    def _late_workers(self, ranks: Sequence[int]) -> tuple[LateWorker, ...]:
        return late_workers([self._workers_now[rank] for rank in ranks])

    def _cancel(self, futures: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
        """Drop what has not started of a call, given by rank; the ranks that are running it."""
        running = cancelled([(self._workers_now[rank], future) for rank, future in futures.items()])
        workers = self.workers
        if force and running and workers:  # a shutdown ends them anyway
            for rank in running:
                ray.kill(workers[rank])
            self._note_lost(
                [
                    self._workers_now[rank].failure("cancelled", f"its call of {method!r} was cancelled with force")
                    for rank in running
                ]
            )
        return running

    def _note_lost(self, failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
        """Note who is dead, unless it has been replaced; the failures as they are to be told."""
        judged = tuple(failures)
        if self._memory_limit is not None:
            judged = judge(self._token, judged, self._workers_now, self._memory_limit)
        with self._lock:
            for failure in judged:
                now = self._workers_now[failure.rank]
                if (failure.node_id, failure.pid) == (now.node_id, now.pid):
                    self._lost.setdefault(failure.rank, failure)
        self._show_states()
        return tuple(self._lost.get(failure.rank, failure) for failure in judged)

    def _show_states(self) -> None:
        """What the cluster's grid shows of each worker."""
        with self._lock:
            for worker in self.worker_metadata:  # nothing after a shutdown
                rank, state = worker["global_rank"], worker["state"]
                if rank in self._restarting or rank in self._lost:
                    worker["state"] = "restarting" if rank in self._restarting else "dead"
                elif state in ("restarting", "dead"):
                    worker["state"] = "alive"

    def _facts_by_actor(self) -> Mapping[str, WorkerFacts]:
        return self._facts
