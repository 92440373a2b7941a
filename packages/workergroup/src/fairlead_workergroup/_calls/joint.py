# SPDX-License-Identifier: Apache-2.0
"""Calls of the workers of several groups: they are sent together, and waited for together."""

import contextlib
import logging
from asyncio import _get_running_loop
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from .. import _world
from .._observe.calls import Outcome
from .._start.worker_class import Method
from .._transport.arguments import Answer, Gathered, PerWorker, Shard
from .._transport.futures import Waiter
from .._transport.messages import Transport
from .._world import Deadline
from ..exceptions import CallTimeoutError, EpochError, WorkerFailure, WorkerFailureError, name_group
from .call import Call, CallResults, Result, make_order
from .execution import Execution
from .plan import CallOptions, CallPlan, Column, column_per_worker, make_columns, make_plan
from .sender import Admitted, Order, Sender, Sent
from .view import AddressedWorkers, Target, ViewOptions, find_workers, split_options

logger = logging.getLogger(__name__)

Obstacle = list[WorkerFailure] | Transport | None  # None for a closed gate


def join(*parts: AddressedWorkers) -> "JoinedView":
    """Join workers of several groups in one view, whose calls reach all of them together.

    Args:
        parts: groups, handles, and views of them. Groups need different names, and no worker may be in two parts.

    Returns:
        The view.

    Raises:
        TypeError: a part is something else.
        ValueError: there is no part, two groups have the same name, or a part has options of its own.

    >>> both = join(trainer, rollouts.at(dp=0))  # doctest: +SKIP
    >>> both.call("set_peers", PerWorker(addresses)).result()  # doctest: +SKIP
    """
    for part in parts:
        if not isinstance(part, AddressedWorkers):
            raise TypeError(f"join takes groups, handles and views of them, got {type(part).__name__}")
    targets = [find_workers(part)[1] for part in parts]
    names = {id(target.sender): target.sender.roster.name_prefix for target in targets}
    if not parts or len(set(names.values())) < len(names):
        raise ValueError(
            f"join needs groups with different names, which its errors use, got {list(names.values())}. Start the "
            "groups with different `name_prefix`, and give either a group or its handle."
        )
    if chosen := [part for part, target in zip(parts, targets, strict=True) if target.options is not None]:
        raise ValueError(f"{chosen[0]!r} has options. Join views without options: join(...).with_options(...)")
    return JoinedView(parts)


class JoinedView:
    """Workers of several groups, which are called together. `join` returns it.

    A call checks all parts before it sends anything: if one of them refuses, no worker runs the call. All workers see
    the calls of joined views in one order. On an event loop, a call that has to wait for a part, such as for a restart,
    is sent to each part as soon as that part can take it.

    A part can restart lost workers, and be resized, as without the view.

    Attributes:
        parts: the groups, handles and views that were joined.
    """

    def __init__(self, parts: Sequence[AddressedWorkers], options: CallOptions | None = None) -> None:
        self.parts: tuple[AddressedWorkers, ...] = tuple(parts)
        self._options = options

    def __repr__(self) -> str:
        options = [] if self._options is None else [self._options]
        return f"JoinedView({', '.join(map(repr, [*self.parts, *options]))})"

    def with_options(self, **options: Unpack[ViewOptions]) -> "JoinedView":
        """Return a view whose `call` uses these options and passes every keyword on to the method.

        Args:
            options: as for `call`. Options that are not given stay as they are.

        Returns:
            A view of the same workers.

        Raises:
            TypeError, ValueError: options contradict each other, or a part does not have an axis.
        """
        changed = replace(self._options or CallOptions(), **options)
        _plan([find_workers(part)[1] for part in self.parts], changed)
        return JoinedView(self.parts, changed)

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> "JoinedCall":
        """Call a method of all workers of all parts. The classes of the parts may differ, if all have the method.

        All workers get the same arguments, except for those that are wrapped. `PerWorker` has a value for each called
        worker, in the order of the parts and their ranks. `Shard` splits its values in each part, so all parts need its
        axes, in the same sizes. A large value is stored once for each part.

        Args:
            method: the name of the method; the method itself, if all parts have it; or any other function, for workers
                of any class.
            args: positional arguments of the method.
            kwargs: `collect`, `first_along`, `timeout`, `retries` and `discard`, as for `RayWorkerGroup.call`, which
                hold in each part; after `with_options`, and otherwise, keyword arguments of the method. Without
                `timeout`, the shortest `Timeouts.call_s` of the groups holds for all.

        Returns:
            The call, which may be still running. Its result is one list, in the order of the parts.

        Raises:
            AttributeError, TypeError, ValueError, WorkerFailureError, WorkerGroupError: as `RayWorkerGroup.call`, for
                the part that the error names. Nothing was sent. A generator method is refused too.
        """
        options, kwargs = split_options(self._options, kwargs)
        while True:
            workers = [find_workers(part) for part in self.parts]
            try:
                return JoinedCall(_send(_prepare(workers, method, options, args, kwargs), options))
            except EpochError:
                # Another thread has resized a group. Values that were split for its size before cannot be sent.
                if any(isinstance(value, (Shard, PerWorker)) for value in (*args, *kwargs.values())):
                    raise


class JoinedCall(CallResults[Result]):
    """A call of the workers of a `JoinedView`, which waits for all parts at once.

    Its methods are those of `Call`. `WorkerFailure`, `LateWorker` and `Outcome` have the name of the `group`, and other
    errors a note with it.

    Attributes:
        calls: the call of each part, for what only one group has, such as its epoch and the statistics.
    """

    def __init__(self, executions: Sequence[Execution]) -> None:
        self.calls: tuple[Call, ...] = tuple(map(Call, executions))
        self._execution: _Together = _Together(executions)

    def __repr__(self) -> str:
        states = (f"{name!r} {one.describe()}" for name, one in self._execution.named)
        return f"JoinedCall({self.method_name()!r}, {', '.join(states)})"

    @property
    def refs(self) -> list[Any]:
        """The ObjectRefs of the results, in the order of `result()`, as for a `Call`."""
        return [ref for call in self.calls for ref in call.refs]

    def done(self) -> bool:
        """Return whether all called workers have finished or failed, or could not be called."""
        return all(call.done() for call in self.calls)

    def cancel(self, force: bool = False) -> dict[str, list[int]]:
        """Give the call up in all parts, as `Call.cancel` does.

        Returns:
            By the name of the group, the ranks that `Call.cancel` returns.
        """
        return self._execution.cancel(force=force)

    def method_name(self) -> str:
        """Return the name of the method that was called."""
        return self.calls[0].method_name()

    def as_argument(self) -> Gathered:
        """Return the references that travel to the workers of another call, as for a `Call`."""
        return Gathered(tuple(answer.ref for answer in self.as_arguments()))

    def as_arguments(self) -> list[Answer]:
        """Return each result as an argument of another call, as for a `Call`."""
        return [answer for call in self.calls for answer in call.as_arguments()]


@contextlib.contextmanager
def _named(sender: Sender) -> Iterator[None]:
    """Let errors in this block name the group."""
    try:
        yield
    except Exception as error:
        name_group(error, sender.roster.name_prefix)
        raise


@dataclass(eq=False)
class _Part:
    """The part of a call that goes to the workers of one group, before it is sent."""

    owner: object
    sender: Sender
    order: Order
    plan: CallPlan


def _plan(targets: Sequence[Target], options: CallOptions) -> list[CallPlan]:
    if options.collect == ():
        raise ValueError("collect=() returns one worker's value, and a joined view returns a list: call that worker")
    plans, seen = list[CallPlan](), set[tuple[int, int]]()
    for target in targets:
        with _named(target.sender):
            plans.append(make_plan(target.mesh, options))
            ranks = {(id(target.sender), rank) for rank in target.mesh.ranks}
            if twice := sorted(rank for _, rank in seen & ranks):
                raise ValueError(f"ranks {twice} are in two parts of a joined view: give each worker once")
            seen |= ranks
    return plans


def _prepare(
    workers: Sequence[tuple[object, Target]],
    method: str | Callable[..., Any],
    options: CallOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[_Part]:
    """Check all parts of a call, and store the values that have to be stored."""
    plans = _plan([target for _, target in workers], options)
    methods = [_find_method(target.sender, method) for _, target in workers]
    if len({one.function is None for one in methods}) > 1:
        raise TypeError(f"{methods[0].name!r} is a method in some groups only. Give a name that all of them have.")
    total = sum(len(plan.called) for plan in plans)
    parts, begin, deadline = list[_Part](), 0, Deadline()
    for (owner, target), plan, own in zip(workers, plans, methods, strict=True):
        sender, end = target.sender, begin + len(plan.called)

        def column(what: str, value: Any, plan: CallPlan = plan, mine: slice = slice(begin, end)) -> Column:
            if isinstance(value, PerWorker):
                values = column_per_worker(what, value.values, total).values[mine]
                return Column(values, range(len(values)))
            if isinstance(value, Shard):
                _check_axes(plans, value.axes)
            return plan.column(what, value)

        with _named(sender):
            columns, named = make_columns(args, kwargs, column)
            order = make_order(sender, own, plan, columns, named, options, sharding=target.sharding)
        parts.append(_Part(owner, sender, order, plan))
        begin, deadline = end, deadline.sooner(order.deadline)
    return [replace(part, order=part.order._replace(deadline=deadline)) for part in parts]


def _find_method(sender: Sender, method: str | Callable[..., Any]) -> Method:
    with _named(sender):
        found = sender.described.worker_class.method(method)
        if found.result == "items":
            raise TypeError(f"{found.name!r} is a generator method: call each group, and stream its items")
        return found


def _check_axes(plans: Sequence[CallPlan], axes: Sequence[str]) -> None:
    shapes = [{} if plan.mesh.single else plan.mesh.sharding.shape for plan in plans]
    for axis in axes:
        sizes = [shape.get(axis) for shape in shapes]
        if None in sizes or len(set(sizes)) > 1:
            raise ValueError(
                f"the parts have the sizes {sizes} along {axis!r}, and a Shard of a joined view needs one size. Use "
                "PerWorker with a value for each worker, or call the groups one after the other."
            )


def _send(parts: Sequence[_Part], options: CallOptions) -> list[Execution]:
    """Send the requests of all parts, or none."""
    sent: Sequence[Sent | Future[Sent]] = []
    if _get_running_loop() is None:
        sent = _send_now(parts)
    else:
        at_once = Deadline.after(0.0)
        for part in parts:
            part.order = part.order._replace(requests=list(part.order.requests))  # for the second attempt
        if not any(part.sender.queue.busy for part in parts):  # otherwise earlier calls are still waiting
            with contextlib.suppress(CallTimeoutError):
                sent = _send_now([replace(part, order=part.order._replace(deadline=at_once)) for part in parts])
        sent = sent or [part.sender.send_later(part.order) for part in parts]
    for part in parts:
        part.sender.counters.add(calls=1, puts=part.order.stored[0])
    return [
        Execution(part.sender, part.owner, part.order, one, part.plan, options)
        for part, one in zip(parts, sent, strict=True)
    ]


def _send_now(parts: Sequence[_Part]) -> list[Sent]:
    ready = []
    for part in parts:
        with _named(part.sender):
            ready.append(replace(part, order=part.sender.prepare(part.order)))
    # Every thread passes the gates in the same order, because two threads could wait for each other otherwise.
    gated = sorted({id(part.sender): part for part in ready}.values(), key=lambda part: id(part.sender))
    while isinstance(tried := _enter(gated, ready), tuple):
        part, obstacle = tried
        # No gate is held here.
        if obstacle is None and part.sender.membership.gate.run(lambda: True, part.order.deadline):
            continue
        with _named(part.sender):
            part.sender.overcome(part.order, obstacle)
    return tried


def _enter(gated: Sequence[_Part], parts: Sequence[_Part]) -> list[Sent] | tuple[_Part, Obstacle]:
    """Send the requests once the gates of all groups are passed; or return a part, and what it has to wait for."""
    if gated:
        entered = gated[0].sender.membership.gate.run(partial(_enter, gated[1:], parts), Deadline.after(0.0))
        return (gated[0], None) if entered is None else entered
    admitted = []
    for part in parts:
        with _named(part.sender):
            one = part.sender.admit(part.order)
        if not isinstance(one, Admitted):
            return part, one
        admitted.append(one)
    return [part.sender.submit(part.order, one) for part, one in zip(parts, admitted, strict=True)]


class _Together:
    """The executions of all parts, as `CallResults` waits for one."""

    def __init__(self, executions: Sequence[Execution]) -> None:
        self.executions = executions
        self.named = [(one.sender.roster.name_prefix, one) for one in executions]

    @property
    def connected(self) -> bool:
        return self.executions[0].connected

    def cancel(self, *, force: bool = False) -> dict[str, list[int]]:
        ranks: dict[str, list[int]] = {}
        for name, one in self.named:
            ranks.setdefault(name, []).extend(one.cancel(force=force))
        return ranks

    async def results(self, on: Waiter, timeout: float | None = None) -> list[Any] | None:
        deadline = self.executions[0].until(timeout)  # all have the same one
        while True:
            await self._until_sent(on, deadline)
            attempts = [one.attempt for one in self.executions]
            futures = [one.in_order() for one in self.executions]
            try:
                values = iter(await on.all([one for own in futures for one in own], deadline, self._check_late))
            except Exception as error:  # noqa: BLE001  any exception of a worker
                failure = await on.apart(self._try_again, error, attempts, deadline)
                if failure is not None:
                    raise failure  # noqa: B904  chained there
                continue
            pairs = zip(self.executions, futures, strict=True)
            results = [one.shape([next(values) for _ in own]) for one, own in pairs]
            discard = self.executions[0].options.discard
            return None if discard else [value for own in results for value in own]

    async def _until_sent(self, on: Waiter, deadline: Deadline) -> None:
        for one in self.executions:
            with _named(one.sender):
                one.check_open()
                await one.until_sent(on, deadline)

    def _try_again(self, error: BaseException, attempts: Sequence[int], deadline: Deadline) -> BaseException | None:
        """Repeat the part of a call that has failed, if that is due; otherwise return the failure."""
        failures: dict[int, BaseException] = {}
        for at, one in enumerate(self.executions):
            with _named(one.sender):
                failure = one.failure(error)
            if failure is not error:
                failures[at] = failure
        if not failures:
            return error
        # The loss of a worker explains the errors of those that communicated with it.
        at = min(failures, key=lambda at: not isinstance(failures[at], WorkerFailureError))
        (name, one), failure = self.named[at], failures[at]
        with _named(one.sender):
            if isinstance(failure, WorkerFailureError) and one.repeat(attempts[at], deadline):
                return None
        name_group(failure, name)
        return failure

    def _check_late(self, deadline: Deadline) -> Deadline:
        """Log the workers of all parts that have not finished; see `Execution.check_late`."""
        errors = []
        for name, one in self.named:
            if pending := one.pending():
                errors.append(one.late_error(pending))
                name_group(errors[-1], name)
        if not errors:
            return Deadline()
        order, called = self.executions[0].order, sum(len(one.ranks) for one in self.executions)
        late = tuple(worker for error in errors for worker in error.late)
        reason = "\n".join(error.reason for error in errors if error.reason)
        error = CallTimeoutError(order.method.name, _world.current.now() - order.began, called, late, reason)
        if not deadline.passed:
            logger.warning("%s", error)
            return deadline
        raise error

    async def iterate(self, on: Waiter) -> AsyncGenerator[Outcome]:
        deadline = self.executions[0].order.deadline
        await self._until_sent(on, deadline)
        waiting = {future: (at, of) for at, one in enumerate(self.executions) for of, future in enumerate(one.futures)}
        while waiting:
            for future in await on.some(dict.fromkeys(waiting), deadline, self._check_late):
                at, of = waiting.pop(future)
                one = self.executions[at]
                with _named(one.sender):
                    outcome = await one.outcome(on, of, {})
                if of in one.answering or outcome.error is not None:
                    yield self._name(at, outcome)

    async def outcomes(self, timeout: float | None, on: Waiter) -> AsyncGenerator[Outcome]:
        deadline = self.executions[0].until(timeout)
        for at, one in enumerate(self.executions):
            left = deadline.left()
            with _named(one.sender):
                found = [outcome async for outcome in one.outcomes(left, on)]
            for outcome in found:
                yield self._name(at, outcome)

    async def wait(self, on: Waiter, timeout: float | None) -> bool:
        deadline = self.executions[0].until(timeout)
        return all([await one.wait(on, deadline.left()) for one in self.executions])

    def _name(self, at: int, outcome: Outcome) -> Outcome:
        name = self.named[at][0]
        if outcome.error is not None:
            name_group(outcome.error, name)
        return replace(outcome, group=name)
