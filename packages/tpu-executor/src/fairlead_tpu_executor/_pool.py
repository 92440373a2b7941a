# SPDX-License-Identifier: Apache-2.0
"""The one engine: slices that are held, and runs on them."""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from fairlead_placement import Slot
from fairlead_placement.spi import SlotClaim, claim_slots, release_when_dropped

from ._accelerators.config import (
    AcceleratorConfigType,
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    TpuAcceleratorConfig,
)
from ._accelerators.slices import SliceInfo
from ._nodes import gone_nodes, silent_nodes
from ._reserve.reservation import Holding
from ._run.attempt import HostCall, cancel, watch
from ._run.budget import Backoff, Budget
from ._run.retry import Crashes, retry
from ._run.status import JobInfo, JobStatus, JobSucceeded
from ._run.targets import Place, start, submit
from ._run.verdicts import judge
from ._run.work import Class, Function, Work, work_of
from .exceptions import PoolBusyError, TpuExecutorError

__all__ = ["PoolStatistics", "SlicePool", "arranged"]


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool has done so far.

    Attributes:
        attempts: how often something was started on all hosts.
        failures: how many of these the function or the system failed, those included that turned out to be the first
            sign of a preemption.
        preemptions: how many of these ended by the loss of a slice.
        reservations: how many slices were taken, replacements included.
    """

    attempts: int = 0
    failures: int = 0
    preemptions: int = 0
    reservations: int = 0


class SlicePool:
    """Whole slices that are kept from run to run; a run goes to every host of every slice.

    Slices are taken on first use, kept until `close()`, and replaced one by one when they are lost. One run at a time:
    a second one queues.

        with SlicePool("v4-16", 2) as pool:
            results = pool.run(train, "gs://data", steps=1000)  # a result per host, slice by slice

    Args:
        tpu_type: such as "v4-16"; or a whole configuration, of whatever accelerators.
        num_slices: how many, or a list of allowed numbers.
        options: the further arguments of `TpuAcceleratorConfig`.

    Raises:
        TypeError, ValueError: as of the configuration.

    Attributes:
        config: the configuration.

    >>> SlicePool("v4-16", [1, 2])
    SlicePool(1 or 2 x v4-16, 0 held)
    """

    def __init__(
        self,
        tpu_type: str | AcceleratorConfigType,
        num_slices: int | Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(tpu_type, (TpuAcceleratorConfig, GpuAcceleratorConfig, CpuAcceleratorConfig)):
            config = replace(tpu_type, **options) if options else tpu_type
            if num_slices is not None:
                raise TypeError(
                    "give the number of slices with the type, or in the configuration (pod_count), not both"
                )
        else:
            config = TpuAcceleratorConfig(tpu_type, 1 if num_slices is None else num_slices, **options)
        self.config: AcceleratorConfigType = config
        self._holding = Holding(config)
        self._turn = threading.Lock()
        self._running = ""
        self._counts = PoolStatistics()
        release_when_dropped(self, self._holding.leak, self._holding.give_back)

    def __repr__(self) -> str:
        sizes = " or ".join(map(str, self._holding.sizes))
        return f"SlicePool({sizes} x {self.config.kind}, {len(self._holding.leases)} held)"

    def reserve(self) -> "SlicePool":
        """Have healthy slices: those that are held, and new ones in the place of lost ones.

        Raises:
            InsufficientSlicesError: not enough within the scale timeout; nothing is held then.
            PortUnavailableError: a port that was asked for is taken; nothing is held then.
            PoolBusyError: something runs here, and the time to queue is over.
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`.
        """
        with self._my_turn("reserve"):
            self._holding.ready()
        return self

    def scale(self, num_slices: int | Sequence[int]) -> "SlicePool":
        """Have another number of slices from now on. Raises as `reserve`; TypeError, ValueError: no such number."""
        sizes = TpuAcceleratorConfig(pod_count=num_slices).sizes
        if not isinstance(self.config, TpuAcceleratorConfig) and sizes != self.config.sizes:
            raise ValueError(
                f"a pool on {self.config.kind} hosts is one group of workers: give worker_count, not a size"
            )
        with self._my_turn("scale"):
            self._holding.sizes = sizes
            self._holding.ready()
        return self

    @property
    def slices(self) -> tuple[SliceInfo, ...]:
        """What is held, in order; nothing before the first use."""
        return tuple(lease.slice for lease in self._holding.leases)

    def slots(self) -> tuple[Slot, ...]:
        """Every host as a slot of fairlead-placement, in the order of slices and TPU worker ids. Raises as `reserve`.

        What runs in a slot has the variables in its `env`. While a worker group is there, runs are refused.
        """
        self.reserve()
        return self._holding.slots()

    def statistics(self) -> PoolStatistics:
        """What has been done so far."""
        return replace(self._counts, reservations=self._holding.reservations)

    def run(self, function: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every host, again and again as the budgets allow, and return what it returns.

        Args:
            function: plain or `@ray.remote`.
            args: its arguments. References to objects are replaced by their values.
            kwargs: its arguments by name.

        Returns:
            One result per host, in the order of slices and TPU worker ids; with `flatten=False` one list per slice.

        Raises:
            TypeError, ValueError: what cannot be run. Nothing was started.
            InsufficientSlicesError: too few slices within the scale timeout; nothing is held then.
            PortUnavailableError: a port that was asked for is taken; nothing is held then.
            ResourceInsufficientError: a worker group, or instances of a class, are on the slices.
            PreemptedTooOftenError: slices were lost once more than allowed.
            PoolBusyError: something else runs here, and the time to queue is over.
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`; no budget was used for that.
            BaseException: what the function raised the last time.
        """
        return self._run(function, args, kwargs)

    def run_on_first_hosts(self, function: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """As `run`, on worker 0 of each slice only."""
        return self._run(function, args, kwargs, first_hosts=True)

    def attempt(self, function: Function, /, *args: Any, **kwargs: Any) -> JobStatus:
        """Run a function once, as `run` does, and return the outcome as a value.

        A process that died is a failure of the function unless its host is lost within `grace_s`.

        Raises:
            Exception: as of `run`, but for what becomes of the function.
        """
        with self._my_turn(_name(function)) as work_on:
            return work_on(function, args, kwargs, False)(1)

    def submit(self, function: Function, /, *args: Any, **kwargs: Any) -> list[list[Any]]:
        """Start a function on every host and return references, a list per slice.

        Nothing is watched or repeated: `ray.get` raises Ray's errors. What is submitted while something runs waits for
        it, host by host.

        Raises:
            TypeError, ValueError: what cannot be run. Nothing was started.
            Exception: as of `reserve`.
        """
        work = self.checked(function)
        payload = work.put(args, kwargs)
        closed = self._holding.closed
        self.reserve()
        places = self._holding.places(work)
        self._holding.check_open(closed)

        def submit_all() -> list[list[Any]]:
            return [[submit(place, payload, raw=True) for place in of_slice] for of_slice in places]

        return self._holding.head.ask(submit_all, undo=_cancel_late)

    def get(self, refs: Sequence[Sequence[Any]]) -> list[Any]:
        """Wait for references that `submit` returned, and return their values in the order of `run`.

        `ray.get` does the same, but does not end when Ray's head does not answer.

        Args:
            refs: a list of references per slice.

        Returns:
            One value per host; with `flatten=False` one list per slice.

        Raises:
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`.
            Exception: what the function raised, or Ray's error of a host that was lost; the first in that order.
        """
        flat = [ref for of_slice in refs for ref in of_slice]
        values = iter(self._holding.head.ask(ray.get, flat))
        return arranged([[next(values) for _ in of_slice] for of_slice in refs], self.config.flatten)

    def start(self, cls: Class, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[list[Any]], SlotClaim]:
        """Have an actor for a class on every host, a list per slice, and the claim that says so.

        Raises:
            TypeError, ValueError: what cannot be run. Nothing was started.
            ResourceInsufficientError: somebody is there already.
            Exception: as of `reserve`.
        """
        work = self.checked(cls, of_class=True)
        payload = work.put(args, kwargs)
        self.reserve()
        claim = claim_slots(self._holding.slots(), f"instances of {work.name}")
        places = self._holding.places(work)

        def start_all() -> list[list[Any]]:
            return [[start(place, payload) for place in of_slice] for of_slice in places]

        try:
            return self._holding.head.ask(start_all, undo=_kill_late), claim
        except BaseException:
            claim.release()
            raise

    def checked(self, function: Function | Class, *, of_class: bool = False) -> Work:
        """What can be said of a function or a class before anything is reserved.

        Raises:
            TypeError, ValueError: what cannot be run here.
        """
        work = work_of(function, of_class=of_class)
        work.remote_options(self.config, self.config.nominal())
        return work

    def close(self) -> bool:
        """Give everything back. Can be repeated; the next use reserves again.

        When Ray's head does not answer within `head_timeout_s`, a warning names the slices that are still held: close
        the pool again when the head answers. Ray returns them, too, when the driver ends.

        Returns:
            Whether Ray had everything back in time.
        """
        self._holding.closed += 1
        return self._holding.give_back()

    def __enter__(self) -> "SlicePool":
        return self.reserve()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, first_hosts: bool = False
    ) -> list[Any]:
        config = self.config
        healthy_s = math.inf if config.healthy_after_s is None else config.healthy_after_s
        budget = Budget(config.max_retries_failure, config.max_retries_preemption, healthy_s)
        with self._my_turn(_name(function)) as work_on:
            crashes = Crashes(config.crash_grace_s, functools.partial(self._lost, self._holding.closed))
            attempts = work_on(function, args, kwargs, first_hosts)
            return list(retry(attempts, budget, Backoff(), crashes=crashes).result)

    def _lost(self, closed: int, slices: Sequence[SliceInfo]) -> list[SliceInfo]:
        """Return those slices that have lost a host. The next attempt does not use them."""
        self._holding.check_open(closed)
        nodes = frozenset(node_id for one in slices for node_id in one.node_ids)
        gone, silent = self._holding.head.ask(lambda: (gone_nodes(nodes), silent_nodes(nodes)))
        # Ray takes a host that is silent to be alive for some time yet.
        self._holding.quarantine(silent - gone)
        return [one for one in slices if not (gone | silent).isdisjoint(one.node_ids)]

    @contextlib.contextmanager
    def _my_turn(self, name: str) -> Iterator[Callable[..., Callable[[int], JobStatus]]]:
        """One at a time; gives what turns a function and its arguments into something to attempt."""
        limit = self.config.queue_timeout_s
        began = time.monotonic()
        running = self._running
        if not self._turn.acquire(timeout=-1 if limit is None else limit):
            raise PoolBusyError(running or "something", time.monotonic() - began)
        self._running = name
        try:
            yield self._attempts
        finally:
            self._running = ""
            self._turn.release()

    def _attempts(
        self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], first_hosts: bool
    ) -> Callable[[int], JobStatus]:
        work = self.checked(function)
        payload = work.put(args, kwargs)
        closed = self._holding.closed
        return lambda number: self._attempt(work, payload, number, closed, first_hosts)

    def _attempt(self, work: Work, payload: Any, number: int, closed: int, first_hosts: bool) -> JobStatus:
        if self._holding.closed != closed:
            raise TpuExecutorError(f"the pool was closed while {work.name} ran. Run it in a pool that stays open.")
        self._holding.ready(closed)
        accelerators = isinstance(self.config, TpuAcceleratorConfig)
        head = self._holding.head
        info = JobInfo(work.name, "running", self.config.kind, self.slices, number)
        claim = claim_slots(self._holding.slots(), f"run of {work.name}")
        began = time.monotonic()
        calls: list[HostCall] = []
        try:
            everywhere = [place for of_slice in self._holding.places(work) for place in of_slice]
            places = [place for place in everywhere if place.worker == 0 or not first_hosts]
            self._holding.check_open(closed)  # else there would be fewer places, or none
            self._count(attempts=1)
            head.ask(_submit_all, calls, places, payload, undo=lambda _: _cancel_late([[one.ref for one in calls]]))
            errors = watch(
                calls,
                lambda call: head.ask(functools.partial(submit, call.place, payload, dedicated=True), undo=_cancel_one),
                head,
                grace_s=self.config.grace_s,
                accelerators=accelerators,
            )
        finally:
            try:
                cancel(calls, head)
            finally:
                claim.release()
        info = replace(info, seconds=time.monotonic() - began)
        if not errors:
            return JobSucceeded(replace(info, state="succeeded"), self._arranged(calls))
        gone = head.ask(gone_nodes, {place.node_id for place in places})
        verdict = judge(errors, gone, accelerators=accelerators)
        self._holding.quarantine(verdict.quarantine)
        lost = verdict.kind == "infrastructure"
        self._count(**{"preemptions" if lost else "failures": 1})
        return verdict.status(replace(info, state=_STATES[verdict.kind]))

    def _arranged(self, calls: Sequence[HostCall]) -> list[Any]:
        nested: list[list[Any]] = [[] for _ in self.slices]
        for call in calls:
            nested[call.place.at].append(call.value)
        return arranged(nested, self.config.flatten)

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


_STATES: dict[str, Any] = {"user": "failed", "infrastructure": "preempted", "system": "error"}


def _submit_all(calls: list[HostCall], places: Sequence[Place], payload: Any) -> None:
    for place in places:
        calls.append(HostCall(place, submit(place, payload)))


def _cancel_one(ref: Any) -> None:
    ray.cancel(ref, force=True)


def _cancel_late(refs: Sequence[Sequence[Any]]) -> None:
    """End what was submitted after everybody had stopped waiting for it."""
    for ref in (ref for of_slice in refs for ref in of_slice):
        _cancel_one(ref)


def _kill_late(actors: Sequence[Sequence[Any]]) -> None:
    """End the actors that were started after everybody had stopped waiting for them."""
    for actor in (actor for of_slice in actors for actor in of_slice):
        ray.kill(actor)


def arranged(nested: Sequence[Sequence[Any]], flatten: bool) -> list[Any]:
    """One list of all hosts, or one per slice."""
    return [value for of_slice in nested for value in of_slice] if flatten else [list(one) for one in nested]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or getattr(function, "_function_name", None) or "a function")
