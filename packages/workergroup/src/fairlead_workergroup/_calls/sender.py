# SPDX-License-Identifier: Apache-2.0
"""The sending of requests: in turn, after a restart that is due, and without blocking an event loop."""

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import ray
from ray import ObjectRef

from fairlead_placement.extension import run_in_thread
from fairlead_sharding import NamedSharding

from .. import _world
from .._lifecycle.delivery import OverlappingCalls
from .._membership.judge import Evidence, Verdict
from .._membership.machine import FixedMembership
from .._membership.model import Snapshot
from .._membership.operations import RestartPolicy
from .._membership.roster import Roster
from .._observe.query import cancel_calls, late_workers
from .._ray_private import actor_id_of_ref
from .._start.worker_class import Described, Method
from .._transport.arguments import Arguments, Gathered, NotPicklableError
from .._world import Deadline
from ..exceptions import BrokenEpochError, CallTimeoutError, EpochError, LateWorker, WorkerFailure, WorkerFailureError
from .plan import Column, Recipients


class Request(NamedTuple):
    """The request to one worker: a method of its host, the arguments, and the back-pressure its host does not know."""

    method: str
    args: list[Any]
    kwargs: dict[str, Any]
    backpressure: int | None = None


class Need(NamedTuple):
    """A condition that has to hold in a worker when it begins a method.

    Attributes:
        function: pickled by `ray.cloudpickle`; it raises an error if that does not hold. If it is a `RayError` with an
            attribute `fairlead_error`, a pickled function and values, the caller gets the error that the function
            returns for the rank and the values.
        args: its arguments.
    """

    function: bytes
    args: tuple[Any, ...]


class Order(NamedTuple):
    """A call that is ready to be sent, now or later.

    Attributes:
        sharding: the axes that the call was planned on; None if its ranks were given by number.
    """

    method: Method
    ranks: Sequence[int]
    requests: Iterable[Request]  # the request to each of them; a list if the call may be repeated
    began: float
    deadline: Deadline
    sharding: NamedSharding | None = None
    passes: bool = False  # whether the call belongs to the change of membership that is under way


class Admitted(NamedTuple):
    """The state of a group in which a call may be sent."""

    members: Snapshot
    needs: Sequence[Need]


class Sent(NamedTuple):
    """A call that has been sent."""

    futures: list[Any]
    epoch: int


class _Queue:
    """Runs functions in order in the background."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()  # the first one runs
        self._serving = threading.Lock()  # held by the thread that runs them, and never waited for

    @property
    def busy(self) -> bool:
        """Whether a function runs or waits."""
        return bool(self._waiting)

    def add(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue a function; return a future of its result, which can be cancelled until the function starts."""
        future: Future[Any] = Future()
        self._waiting.append((future, work))
        self._start()
        return future

    def _start(self) -> None:
        """Have a thread run what waits, unless one does."""
        if self._waiting and self._serving.acquire(blocking=False):
            run_in_thread(self._serve)

    def _serve(self) -> None:
        try:
            self._run_waiting()
        finally:
            self._serving.release()
        self._start()  # a function may have been added since

    def _run_waiting(self) -> None:
        while self._waiting:
            future, work = self._waiting[0]
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001  raised by the thread that waits for the future
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del future, work  # so that their values do not stay alive until the next one
            self._waiting.popleft()


@dataclass(eq=False, repr=False)
class Sender:
    """Sends requests to the workers of a group."""

    roster: Roster
    described: Described
    membership: FixedMembership
    call_timeout_s: float | None
    checks: list[Callable[[str, Sequence[int]], Need | None]] = field(default_factory=list)  # of packages; see spi
    queue: _Queue = field(default_factory=_Queue)
    overlapping: OverlappingCalls = field(default_factory=OverlappingCalls)
    is_owner: ClassVar[bool] = True  # whether this process has made the group

    @property
    def policy(self) -> RestartPolicy:
        """The restart policy of the group."""
        return self.membership.policy

    def renew(self, at_least: int = 0) -> None:
        """Bring the roster of another process up to date, to an epoch if one is given."""

    def check_retries(self, retries: int) -> None:
        """Refuse retries in a group that does not restart workers."""
        if retries and not self.policy.on_failure:
            raise ValueError(f"retries={retries} needs a group with restart=Restart(on_failure=True)")

    def _lost_error(self, lost: Sequence[WorkerFailure]) -> WorkerFailureError:
        now = self.roster.now
        if now.is_broken and not self.policy.on_failure:
            return BrokenEpochError(tuple(lost), epoch=now.epoch)
        return WorkerFailureError(tuple(lost), self.membership.remedy(lost))

    def send(self, order: Order) -> Sent:
        """Restart lost workers if that is due, send a request to each rank, and return the futures."""
        while True:
            tried = self.membership.gate.run(partial(self._submit, order), order.deadline, passes=order.passes)
            if isinstance(tried, Sent):
                return tried
            if tried is None:
                raise self.unsent_error(order)
            if order.passes or not self.policy.on_failure:
                raise self._lost_error(tried)
            # A restart may take longer than this call may wait, and runs to its end.
            if not self.membership.restart_lost(order.deadline):
                raise self.unsent_error(order)

    def admit(self, order: Order, *, early: bool = False) -> Admitted | list[WorkerFailure]:
        """Check a call with the gate held; return the lost workers that it has to wait for.

        An `early` check, before anything is stored, raises the errors of calls that need not wait for their turn.
        """
        now = self.roster.check_alive()
        if order.sharding is not now.sharding:
            check_ranks(order, now)
        needs: list[Need] = []
        for check in () if order.passes else list(self.checks):
            if (need := check(order.method.name, order.ranks)) is not None:
                needs.append(need)
        if now.lost:
            lost = self.policy.blocking(now, order.ranks)
            # The methods that a change runs wait for their own workers only.
            if blocking := [failure for failure in lost if not order.passes or failure.rank in order.ranks]:
                if early and not self.policy.on_failure:
                    raise self._lost_error(blocking)
                return blocking
        return Admitted(now, needs)

    def _submit(self, order: Order) -> Sent | list[WorkerFailure]:
        """Send a call with the gate held, or return the lost workers that it has to wait for."""
        if not isinstance(admitted := self.admit(order), Admitted):
            return admitted
        now, needs = admitted
        overlaps = self.described.worker_class.concurrent
        futures = self._send_requests(now, order, needs if overlaps else ())
        if overlaps:
            self.overlapping.note(futures)
        return Sent(futures, now.epoch)

    def _send_requests(self, now: Snapshot, order: Order, needs: Sequence[Need]) -> list[Any]:
        members, requests = now.members, order.requests
        epoch = None if self.is_owner else now.epoch
        if needs or epoch is not None:
            requests = (_fence(request, order.method, [epoch, None, *needs]) for request in requests)
        refs = []
        for rank, request in zip(order.ranks, requests, strict=True):
            method = getattr(members[rank].handle, request.method)
            if request.backpressure is not None:
                method = method.options(_generator_backpressure_num_objects=request.backpressure)
            refs.append(method.remote(*request.args, **request.kwargs))
        return refs

    def send_or_queue(self, order: Order) -> Sent | Future[Sent]:
        """Send without blocking: a thread sends an order that has to wait for its turn or for a restart."""
        order = order._replace(requests=list(order.requests))  # for the second attempt, if the first one is too early
        if not self.queue.busy:  # otherwise earlier calls are still waiting
            # It times out at once if another thread is sending or workers have to be restarted.
            with contextlib.suppress(CallTimeoutError):
                return self.send(order._replace(deadline=Deadline.after(0.0)))

        def send() -> Sent:
            if order.deadline.passed:
                raise self.unsent_error(order)
            return self.send(order)

        return self.queue.add(send)

    def unsent_error(self, order: Order) -> CallTimeoutError:
        """Return the error of a call that could not be sent by its deadline."""
        waited_s, reason = _world.current.now() - order.began, self.membership.describe_wait()
        return CallTimeoutError(order.method.name, waited_s, len(order.ranks), (), reason)

    def failure_error(self, verdicts: Iterable[Verdict]) -> WorkerFailureError:
        """Record losses, and return the error that reports them."""
        lost = self.roster.note(verdicts)
        return WorkerFailureError(tuple(lost), self.membership.remedy(lost))

    def is_lost(self, ref: ObjectRef[Any]) -> bool:
        """Return whether the worker that makes an object is dead or has been replaced."""
        return self.roster.is_lost(actor_id_of_ref(ref))

    def late_workers(self, ranks: Iterable[int]) -> tuple[LateWorker, ...]:
        """Return what these ranks are doing now."""
        now = self.roster.now
        return late_workers([now[rank].process for rank in ranks])

    def cancel(self, futures: Mapping[int, Any], method: str, *, force: bool) -> list[int]:
        """Drop the requests of a call that have not started; return the ranks that run it, which `force` kills."""
        now = self.roster.now
        calls = [(now[rank].process, future) for rank, future in futures.items()]
        running = cancel_calls(calls, in_order=not self.described.worker_class.concurrent)
        now = self.roster.now
        if force and running and not now.ended:  # a shutdown kills them anyway
            for rank in running:
                ray.kill(now[rank].handle)
            cause = f"its call of {method!r} was cancelled with force"
            killed = Evidence("user", "gone", "cancelled", cause)
            self.roster.note([self.roster.judge.tell(now[rank].process, killed) for rank in running])
        return running


_senders: weakref.WeakKeyDictionary[object, Sender] = weakref.WeakKeyDictionary()


def set_sender(group: object, sender: Sender) -> None:
    """Note the sender of a group, which must not refer to it."""
    _senders[group] = sender


def find_sender(group: object) -> Sender:
    """Return the sender of a group."""
    try:
        return _senders[group]
    except KeyError:
        raise TypeError(f"This needs a RayWorkerGroup, got {group!r}") from None


def check_ranks(order: Order, now: Snapshot) -> None:
    """Refuse to send a call that was not planned on these members, unless its ranks were given by number."""
    if order.sharding is None and now.has(order.ranks):
        return
    raise EpochError(
        f"{order.method.name!r} was not sent: the group was resized {now.resizes[-1]}, after the call was made. Make "
        "the call again.",
        now.resizes[-1].epoch,
    )


def store_columns(
    method: Method, args: Sequence[Column], kwargs: Mapping[str, Column], arguments: Arguments
) -> list[Column]:
    """Store the values that have to be stored, and return the arguments as they are sent."""
    method.check(len(args), tuple(kwargs))
    columns = []
    for at, column in enumerate((*args, *kwargs.values())):
        try:
            columns.append(column.map(arguments.prepare))
        except NotPicklableError as error:
            name = list(kwargs)[at - len(args)] if at >= len(args) else method.parameter(at)
            raise TypeError(f"argument {name!r} of {method.name!r}: {error}") from None
    if method.function is not None:
        columns = [Column([method.name]), Column([arguments.prepare(method.function)]), *columns]
    return columns


def make_requests(
    method: Method, recipients: Recipients, columns: Sequence[Column], names: Sequence[str]
) -> Iterator[Request]:
    """Return the request to each recipient in order; the last columns are the keyword arguments of these names."""
    same = []
    for column in columns:
        if column.index is None and not isinstance(column.values[0], Gathered):
            same.append(column.values[0])
    if recipients.answers is not None or len(same) < len(columns):
        return _make_rows(method, recipients, columns, names)
    positional = len(columns) - len(names)
    request = Request(method.hosted, same[:positional], dict(zip(names, same[positional:], strict=True)))
    return itertools.repeat(request, len(recipients.called))


def _make_rows(
    method: Method, recipients: Recipients, columns: Sequence[Column], names: Sequence[str]
) -> Iterator[Request]:
    """Return requests that are not the same for all recipients."""
    gathers = any(isinstance(value, Gathered) for column in columns for value in column.values)
    hosted, count, answers = method.hosted, len(recipients.called), recipients.answers
    positional = len(columns) - len(names)
    rows = zip(*(column.expand(count) for column in columns), strict=True) if columns else [()] * count
    for at, row in enumerate(rows):
        name = hosted
        args, kwargs = list(row[:positional]), dict(zip(names, row[positional:], strict=True))
        if gathers:
            # A method of a host that streams must be a generator itself.
            plan, *flat = _flatten(args, kwargs)
            name, args, kwargs = f"_fairlead_{method.result}", [[None, plan], name, *flat], {}
        if answers is not None and not answers[at]:
            name, args = "_fairlead_silent", [name, *args]
        yield Request(name, args, kwargs, method.backpressure if name == "_fairlead_items" else None)


def _fence(request: Request, method: Method, how: list[Any]) -> Request:
    """Return a request that a worker refuses if it is in another epoch, or if a need does not hold in it."""
    kind = "value" if request.method == "_fairlead_silent" else method.result
    backpressure = method.backpressure if kind == "items" else None
    return Request(f"_fairlead_{kind}", [how, request.method, *request.args], request.kwargs, backpressure)


def _flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return a plan of the arguments, followed by each single value: Ray finds references at the top level only.

    The plan has a pair `(name or None, number of values or None)` for each argument. The number is None for an argument
    that is not a list.
    """
    plan: list[tuple[str | None, int | None]] = []
    flat: list[Any] = []
    for name, value in (*((None, value) for value in args), *kwargs.items()):
        is_list = isinstance(value, Gathered)
        plan.append((name, len(value.refs) if is_list else None))
        flat.extend(value.refs if is_list else [value])
    return [plan, *flat]
