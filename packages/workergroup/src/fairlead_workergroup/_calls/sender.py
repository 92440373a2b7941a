# SPDX-License-Identifier: Apache-2.0
"""How requests reach workers: in turn, after a restart that is due, and without blocking an event loop."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import ray
from ray import ObjectRef

from fairlead_placement.spi import never_connect

from .._arguments import Arguments, Gathered, NotPicklableError
from .._deadline import Deadline
from .._lifecycle.launcher import Launcher
from .._lifecycle.restart import Restarter, RestartPolicy
from .._members import Roster, Snapshot
from .._observe.failures import Verdicts
from .._observe.query import cancel_calls, late_workers
from .._observe.statistics import Counters
from .._ray_private import actor_id_of_ref
from .._start.worker_class import Method
from ..exceptions import CallTimeoutError, LateWorker, WorkerFailureError
from .plan import Column


class Request(NamedTuple):
    """The request to one worker: a method of its host, the arguments, and the back-pressure its host does not know."""

    method: str
    args: list[Any]
    kwargs: dict[str, Any]
    backpressure: int | None = None


@dataclass(frozen=True)
class Order:
    """Everything that is needed to send a call, now or later.

    Attributes:
        method: the name of the method, for errors.
        ranks: the workers to ask.
        requests: the request to each of them.
        began: when the call was made.
        deadline: when to give up waiting for the turn.
        counts: what the call adds to the group's statistics besides the requests.
    """

    method: str
    ranks: Sequence[int]
    requests: Iterable[Request]
    began: float
    deadline: Deadline
    counts: Mapping[str, int] = field(default_factory=dict)


class Sender:
    """Sends requests to the workers of a group.

    Args:
        roster: of the group.
        launcher: what knows the class.
        restarter: what starts lost workers again.
        verdicts: what notes losses.
        counters: of the group.
        call_timeout_s: the deadline of calls that have none of their own.
        after_restart: called with this sender and the ranks that were started again, before a restart is over.

    Attributes:
        roster, verdicts, counters, call_timeout_s: as given.
        policy: the group's policy of restarts.
    """

    def __init__(
        self,
        roster: Roster,
        launcher: Launcher,
        restarter: Restarter,
        verdicts: Verdicts,
        counters: Counters,
        *,
        call_timeout_s: float | None,
        after_restart: Callable[["Sender", list[int]], object],
    ) -> None:
        self.roster = roster
        self.verdicts = verdicts
        self.counters = counters
        self.call_timeout_s = call_timeout_s
        self.policy: RestartPolicy = restarter.policy
        self._launcher = launcher
        self._restarter = restarter
        self._after_restart = after_restart
        self._queue = _Queue()

    def method(self, method: str | Callable[..., Any] | Method) -> Method:
        """Return the method of the class, or the function, that a caller means.

        Raises:
            AttributeError, TypeError: there is none.
        """
        return method if isinstance(method, Method) else self._launcher.worker_class.method(method)

    def restart(self) -> list[int]:
        """Start the dead workers again; return their ranks."""
        return self._restarter.restart(partial(self._after_restart, self))

    def check_retries(self, retries: int) -> None:
        """Refuse retries in a group that restarts nothing.

        Raises:
            ValueError: there would be nobody to repeat the call on.
        """
        if retries and not self.policy.on_failure:
            raise ValueError(f"retries={retries} needs a group with restart_on_failure=True: nobody would be restarted")

    def check_callable(self, called: Collection[int]) -> Snapshot:
        """Return the group's members.

        Raises:
            WorkerFailureError: a worker that the call needs is lost, and the group does not restart it.
            WorkerGroupError: the group, or its Ray, has been shut down.
        """
        now = self.roster.check_alive()
        if now.lost and not self.policy.on_failure and (lost := self.policy.blocking(now.lost.values(), called)):
            raise WorkerFailureError(lost, self._restarter.remedy(lost))
        return now

    def send(self, order: Order) -> list[Any]:
        """Restart lost workers if that is due, send a request to each rank, and return the futures.

        Raises:
            CallTimeoutError, WorkerFailureError, WorkerGroupError: as of `_turn`; nothing has been sent.
        """
        with self._turn(order) as now:
            futures = [
                send(now[rank].handle, request) for rank, request in zip(order.ranks, order.requests, strict=True)
            ]
        self.counters.add(requests=len(futures), **order.counts)
        return futures

    def send_or_queue(self, order: Order) -> list[Any] | Future[list[Any]]:
        """Do the same without blocking: an order that has to wait for its turn or a restart is sent by a thread."""
        if not self._queue.busy:  # otherwise earlier calls are still waiting
            # It times out at once if another thread is sending or workers have to be restarted.
            with contextlib.suppress(CallTimeoutError):
                return self.send(replace(order, deadline=Deadline.after(0.0)))

        def send_later() -> list[Any]:
            if order.deadline.passed:
                raise self.unsent_error(order.method, order.ranks, order.began)
            return self.send(order)

        return self._queue.add(send_later)

    @contextlib.contextmanager
    def _turn(self, order: Order) -> Iterator[Snapshot]:
        """Keep other threads from sending, once the workers of a call are there; the value is the group's members.

        Raises:
            CallTimeoutError: other calls or a restart took longer than the call's deadline.
            WorkerFailureError, WorkerGroupError: as of `check_callable`, or a restart failed.
        """
        turn, deadline = self._restarter.turn, order.deadline
        while True:
            if not turn.acquire(timeout=deadline.left(at_most=threading.TIMEOUT_MAX) or 0.0):
                raise self.unsent_error(order.method, order.ranks, order.began)
            try:
                now = self.check_callable(order.ranks)
                lost = self.policy.blocking(now.lost.values(), order.ranks)
                if not lost:
                    yield now
                    return
                if self._restarter.began is not None:  # this thread restarts them, and a worker was lost again
                    raise WorkerFailureError(lost, self._restarter.remedy(lost))
                if deadline.at is None:
                    self.restart()
                    continue
            finally:
                turn.release()
            # A restart may take longer than this call may wait, and must not be given up half done.
            restart = self._restarter.restart_in_background(partial(self._after_restart, self))
            if not wait([restart], timeout=deadline.left(at_most=threading.TIMEOUT_MAX)).done:
                raise self.unsent_error(order.method, order.ranks, order.began)
            restart.result()

    def unsent_error(self, method: str, called: Collection[int], began: float) -> CallTimeoutError:
        """Return the error of a call that could not be sent by its deadline."""
        reason = self._restarter.describe_wait()
        return CallTimeoutError(method, time.monotonic() - began, len(called), (), reason)

    def failure_error(self, failures: Sequence[Any]) -> WorkerFailureError:
        """Note losses, and return the error that reports them."""
        lost = self.verdicts.note(failures)
        return WorkerFailureError(lost, self._restarter.remedy(lost))

    def is_lost(self, ref: ObjectRef[Any]) -> bool:
        """Return whether the worker that makes an object is dead or has been replaced."""
        return self.roster.is_lost(actor_id_of_ref(ref))

    def late_workers(self, ranks: Iterable[int]) -> tuple[LateWorker, ...]:
        """Return what these ranks are doing now."""
        now = self.roster.snapshot()
        return late_workers([now[rank].facts for rank in ranks])

    def cancel(self, futures: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
        """Drop the requests of a call, given by rank, that have not started.

        Args:
            futures: of the requests.
            method: the name of the method, for reports.
            force: end the workers that are running it.

        Returns:
            The ranks that were running it.
        """
        now = self.roster.snapshot()
        running = cancel_calls([(now[rank].facts, future) for rank, future in futures.items()])
        now = self.roster.snapshot()
        if force and running and not now.ended:  # a shutdown ends them anyway
            for rank in running:
                ray.kill(now[rank].handle)
            cause = f"its call of {method!r} was cancelled with force"
            self.verdicts.note([now[rank].facts.failure("cancelled", cause) for rank in running])
        return running


class _Queue:
    """Runs functions in order on a background thread, which exists only while there is work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.busy = False

    def add(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue a function; return a future of its result, which can be cancelled until the function starts."""
        future: Future[Any] = Future()
        with self._lock:
            if not self.busy:
                threading.Thread(target=self._serve, name="fairlead-calls", daemon=True).start()
                self.busy = True
            self._waiting.append((future, work))
        return future

    def _serve(self) -> None:
        never_connect()
        while (following := self._next()) is not None:
            future, work = following
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  raised by whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)
            del following, future, work  # so that their values are not kept alive until the next one

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self.busy = False
            return None


def is_on_event_loop() -> bool:
    """Return whether this code runs on an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def make_requests(
    count: int,
    method: Method,
    args: Sequence[Column],
    kwargs: Mapping[str, Column],
    *,
    answers: Sequence[bool] | None,
    arguments: Arguments,
) -> Iterator[Request]:
    """Store the values that have to be stored, and return what each of `count` workers is asked, in order.

    Raises:
        TypeError: the method does not take these arguments, and nothing has been stored; or one cannot be pickled.
    """
    method.check(args, kwargs)
    columns = []
    for at, column in enumerate((*args, *kwargs.values())):
        try:
            columns.append(column.mapped(arguments.prepare))
        except NotPicklableError as error:
            name = list(kwargs)[at - len(args)] if at >= len(args) else method.parameter(at)
            raise TypeError(f"argument {name!r} of {method.name!r}: {error}") from None
    if method.function is not None:
        columns = [Column([method.name]), Column([arguments.prepare(method.function)]), *columns]
        args = [*columns[:2], *args]
    return _rows(count, method, columns, len(args), list(kwargs), answers)


def _rows(
    count: int,
    method: Method,
    columns: Sequence[Column],
    positional: int,
    names: Sequence[str],
    answers: Sequence[bool] | None,
) -> Iterator[Request]:
    hosted = method.hosted
    gathers = any(isinstance(value, Gathered) for column in columns for value in column.values)
    rows = zip(*(column.over(count) for column in columns), strict=True) if columns else [()] * count
    for at, row in enumerate(rows):
        name = hosted
        mine, named = list(row[:positional]), dict(zip(names, row[positional:], strict=True))
        if gathers:
            flat = _flattened(mine, named)
            # A method of a host that streams must be a generator itself.
            name, mine, named = f"_fairlead_gathered_{method.result}", [name, *flat], {}
        if answers is not None and not answers[at]:
            name, mine = "_fairlead_silent", [name, *mine]
        yield Request(name, mine, named, method.backpressure if name == "_fairlead_gathered_items" else None)


def _flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """A plan of the arguments, then every value of them by itself: Ray looks for references at the top only.

    The plan has a (name or None, number of values or None) for each argument: None for one that is no list.
    """
    plan: list[tuple[str | None, int | None]] = []
    flat: list[Any] = []
    for name, value in (*((None, value) for value in args), *kwargs.items()):
        several = isinstance(value, Gathered)
        plan.append((name, len(value.refs) if several else None))
        flat.extend(value.refs if several else [value])
    return [plan, *flat]


def send(handle: Any, request: Request) -> Any:
    """Launch a method call; its future."""
    method = getattr(handle, request.method)
    if request.backpressure is not None:
        method = method.options(_generator_backpressure_num_objects=request.backpressure)
    return method.remote(*request.args, **request.kwargs)
