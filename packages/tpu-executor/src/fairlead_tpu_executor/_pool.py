# SPDX-License-Identifier: Apache-2.0
"""A pool: slices that are held from run to run, and the runs on them."""

import contextlib
import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray.runtime_env import RuntimeEnv

from fairlead_placement import Slot
from fairlead_placement.extension import SlotClaim, claim_slots, group_pairs, release_when_dropped

from ._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from ._accelerators.slices import SliceInfo
from ._health import gone_nodes
from ._reserve.leases import Held
from ._reserve.reservation import Reservation
from ._run.attempt import RunScope, run_once
from ._run.retry import Backoff, RetryBudget, retry
from ._run.targets import Target, cancel_task, make_slots, make_targets, start_actor, submit
from ._run.verdicts import JobInfo, JobPreempted, JobStatus, JobSucceeded, StartFailures, judge
from ._run.work import Class, Function, Work, check_call, inspect_work
from .exceptions import PoolBusyError


@dataclass(frozen=True)
class PoolStatistics:
    """Counts of what a pool has done so far.

    Attributes:
        attempts: how often work was started on all hosts.
        failures: how many attempts failed by the function or the system, including those that turned out to be the
            first sign of a preemption.
        preemptions: how many attempts ended with the loss of a slice.
        reservations: how many slices were taken, including replacements.
    """

    attempts: int = 0
    failures: int = 0
    preemptions: int = 0
    reservations: int = 0


class ClosesOnExit:
    """The base of what is closed at the end of its `with` statement."""

    def close(self) -> object:
        """Give everything back. Can be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SlicePool(ClosesOnExit):
    """Whole slices that are kept from run to run. A run goes to every host of every slice.

    Slices are taken on first use, kept until `close()`, and replaced one by one when they are lost. A pool has one run
    at a time; a second run queues.

        with SlicePool("v4-16", 2) as pool:
            results = pool.run(train, "gs://data", steps=1000)  # a result per host, slice by slice

    Args:
        tpu_type: the type of the slices, such as "v4-16"; or a whole configuration, also of other accelerators.
        num_slices: the number of slices, or a list of allowed numbers.
        options: the further arguments of `TpuAcceleratorConfig`.

    Raises:
        TypeError, ValueError: the configuration raises them.

    Attributes:
        config: the configuration.

    >>> SlicePool("v4-16", [1, 2])
    SlicePool(1 or 2 x v4-16, 0 held)
    """

    def __init__(
        self, tpu_type: str | AcceleratorConfigType, num_slices: int | Sequence[int] | None = None, **options: Any
    ) -> None:
        if isinstance(tpu_type, AcceleratorConfigType):
            config = replace(tpu_type, **options) if options else tpu_type
            if num_slices is not None:
                raise TypeError("Give the number of slices here or in the configuration (pod_count), not both.")
        else:
            config = TpuAcceleratorConfig(tpu_type, 1 if num_slices is None else num_slices, **options)
        self.config: AcceleratorConfigType = config
        self._reservation = Reservation(config)
        # Whoever uses the slices has it: one run, or one change of their number, at a time.
        self._turn = threading.Lock()
        self._running = ""
        self._counts: Counter[str] = Counter()
        # By the name of the function.
        self._start_failures: defaultdict[str, StartFailures] = defaultdict(StartFailures)
        release_when_dropped(self, self._reservation.describe_leak, self._reservation.give_back)

    def __repr__(self) -> str:
        sizes = " or ".join(map(str, self._reservation.sizes))
        return f"SlicePool({sizes} x {self.config.kind}, {len(self.slices)} held)"

    def reserve(self) -> "SlicePool":
        """Reserve healthy slices: keep those that are held, and replace lost ones.

        Raises:
            InsufficientSlicesError: not enough within the scale timeout; nothing is held then.
            PortUnavailableError: a requested port is taken; nothing is held then.
            PoolBusyError: something runs here, and the time to queue is over.
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`.
        """
        self._reserve()
        return self

    def scale(self, num_slices: int | Sequence[int]) -> "SlicePool":
        """Hold another number of slices from now on.

        Raises:
            TypeError, ValueError: the number is not allowed.
            Exception: the errors of `reserve`.
        """
        sizes = TpuAcceleratorConfig(pod_count=num_slices).sizes
        if not isinstance(self.config, TpuAcceleratorConfig) and sizes != self.config.sizes:
            raise ValueError(
                f"A pool on {self.config.kind} hosts is one group of workers: give worker_count, not a size."
            )
        with self._take_turn("scale"):
            self._reservation.sizes = sizes
            self._reservation.ensure()
        return self

    @property
    def slices(self) -> tuple[SliceInfo, ...]:
        """The slices that are held, in order; none before the first use."""
        return self._reservation.held.slices

    def slots(self) -> tuple[Slot, ...]:
        """Return every host as a slot of fairlead-placement, in the order of slices and TPU worker ids.

        A process in a slot has the variables in its `env`. While a worker group is on the slots, runs are refused.

        Raises:
            Exception: the errors of `reserve`.
        """
        held = self._reserve()
        rows = self._reservation.head.call(ray.nodes)
        return make_slots(self.config, held, {row["NodeID"]: row.get("Labels") or {} for row in rows})

    def statistics(self) -> PoolStatistics:
        """Return counts of what the pool has done so far."""
        return PoolStatistics(**self._counts, reservations=self._reservation.taken)

    def run(self, function: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every host, repeat it as the budgets allow, and return its results.

        Args:
            function: the function, plain or `@ray.remote`.
            args: its arguments. References to objects are replaced by their values.
            kwargs: its arguments by name.

        Returns:
            One result per host, in the order of slices and TPU worker ids; with `flatten=False` one list per slice.

        Raises:
            TypeError, ValueError: the function cannot be run, or not with these arguments. Nothing was started.
            InsufficientSlicesError: too few slices within the scale timeout; nothing is held then.
            PortUnavailableError: a requested port is taken; nothing is held then.
            ResourceInsufficientError: a worker group, or instances of a class, are on the slices.
            PreemptionLimitError: slices were lost once more than allowed.
            PoolBusyError: something else runs here, and the time to queue is over.
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`; no budget was used for that.
            BaseException: the function's last exception.
        """
        return self._run(function, args, kwargs)

    def run_on_first_hosts(self, function: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function like `run`, on worker 0 of each slice only."""
        return self._run(function, args, kwargs, first_hosts=True)

    def attempt(self, function: Function, /, *args: Any, **kwargs: Any) -> JobStatus:
        """Run a function once, as `run` does, and return the outcome as a value.

        A process that died is a failure of the function unless its host is lost within `grace_s`.

        Raises:
            Exception: the errors of `run`, except those of the function and of lost slices.
        """
        with self._begin_run(function, args, kwargs) as scope:
            return self._attempt(scope, 1)

    def submit(self, function: Function, /, *args: Any, **kwargs: Any) -> list[list[Any]]:
        """Start a function on every host and return references, a list per slice.

        Nothing is watched or repeated: `ray.get` raises Ray's errors. A function that is submitted while something runs
        waits for it, host by host.

        Raises:
            TypeError, ValueError: the function cannot be run. Nothing was started.
            Exception: the errors of `reserve`.
        """
        work = self.checked(function, args, kwargs)
        payload, epoch = work.put(args, kwargs), self._reservation.epoch
        with self._take_turn(work.name):  # Until they are started, nothing may give slices back.
            targets = make_targets(work, self.config, self._reservation.ensure())
            return self._start_all(targets, lambda target: submit(target, payload, dedicated=True), cancel_task, epoch)

    def get(self, refs: Sequence[Sequence[Any]]) -> list[Any]:
        """Wait for references that `submit` returned, and return their values in the order of `run`.

        `ray.get` does the same, but has no deadline when Ray's head does not answer.

        Args:
            refs: a list of references per slice.

        Returns:
            One value per host; with `flatten=False` one list per slice.

        Raises:
            HeadUnreachableError: Ray's head did not answer within `head_timeout_s`.
            Exception: the function's exception, or Ray's error for a lost host; the first in that order.
        """
        values = iter(self._reservation.head.call(ray.get, [ref for of_slice in refs for ref in of_slice]))
        return arrange([[next(values) for _ in of_slice] for of_slice in refs], self.config.flatten)

    def start(self, cls: Class, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[list[Any]], SlotClaim]:
        """Start an actor for a class on every host; return the actors, a list per slice, and the claim on their slots.

        Raises:
            TypeError, ValueError: the class cannot be run. Nothing was started.
            ResourceInsufficientError: the slots are in use.
            Exception: the errors of `reserve`.
        """
        work = self.checked(cls, args, kwargs, of_class=True)
        payload, epoch = work.put(args, kwargs), self._reservation.epoch
        with self._take_turn(work.name):
            held = self._reservation.ensure()
            claim = claim_slots(held.slots, f"instances of {work.name}")
            try:
                targets = make_targets(work, self.config, held)
                return self._start_all(targets, lambda target: start_actor(target, payload), ray.kill, epoch), claim
            except BaseException:
                claim.release()
                raise

    def checked(
        self,
        function: Function | Class,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        of_class: bool = False,
    ) -> Work:
        """Check a call of a function or a class before anything is reserved, and return what is known about it.

        Raises:
            TypeError, ValueError: it cannot be run here, or cannot take these arguments.
        """
        work = inspect_work(function, of_class=of_class)
        check_call(work.name, work.function, args, kwargs or {})
        work.remote_options(self.config, self.config.template())
        RuntimeEnv(**work.environment(self.config)[1])  # Ray checks it here, and not only when the function starts.
        return work

    def close(self) -> bool:
        """Give everything back. Can be repeated; the next use reserves again.

        When Ray's head does not answer within `head_timeout_s`, a warning names the slices that are still held: close
        the pool again when the head answers. Ray also returns them when the driver ends.

        Returns:
            Whether Ray had everything back in time.
        """
        return self._reservation.close()

    def __enter__(self) -> "SlicePool":
        return self.reserve()

    def _run(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, first_hosts: bool = False
    ) -> list[Any]:
        config = self.config
        budget = RetryBudget(config.max_retries_failure, config.max_retries_preemption, config.healthy_after_s)
        with self._begin_run(function, args, kwargs, crash_grace_s=config.crash_grace_s) as scope:
            attempt = functools.partial(self._attempt, scope, first_hosts=first_hosts)
            return list(retry(attempt, budget, Backoff(), grace_s=config.crash_grace_s).result)

    @contextlib.contextmanager
    def _begin_run(
        self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, crash_grace_s: float = 0.0
    ) -> Iterator[RunScope]:
        """Check a function, and wait for its turn."""
        work = self.checked(function, args, kwargs)
        with self._take_turn(work.name):
            payload = work.put(args, kwargs)
            check = functools.partial(self._reservation.check_open, self._reservation.epoch, f"{work.name} ran")
            yield RunScope(work, payload, self._reservation.head, check, self.config.grace_s, crash_grace_s)

    def _attempt(self, scope: RunScope, number: int, *, first_hosts: bool = False) -> JobStatus:
        config, reservation, name = self.config, self._reservation, scope.work.name
        held = reservation.ensure(scope.check_open)
        claim = claim_slots(held.slots, f"run of {name}")
        began = time.monotonic()
        try:
            targets = make_targets(scope.work, config, held, first_hosts=first_hosts)
            scope.check_open()
            self._counts["attempts"] += 1
            calls, errors = run_once(targets, scope)
        finally:
            claim.release()
        info = JobInfo(name, "succeeded", config.kind, held.slices, number, time.monotonic() - began)
        gone = reservation.head.call(gone_nodes, {target.node_id for target in targets}) if errors else frozenset()
        shared = self._start_failures[name].add(errors, gone, info.seconds)
        if not errors:
            values = group_pairs((call.target.at, call.value) for call in calls).values()
            return JobSucceeded(info, arrange(values, config.flatten))
        on_tpus = isinstance(config, TpuAcceleratorConfig)
        status, avoided = judge(info, errors, gone, accelerators=on_tpus, shared=shared)
        reservation.quarantine(avoided, settled=shared)
        self._counts["preemptions" if isinstance(status, JobPreempted) else "failures"] += 1
        return status

    def _reserve(self) -> Held:
        with self._take_turn("reserve"):
            return self._reservation.ensure()

    @contextlib.contextmanager
    def _take_turn(self, name: str) -> Iterator[None]:
        """Wait until nothing else runs in the pool, within the time to queue."""
        limit = self.config.queue_timeout_s
        began = time.monotonic()
        running = self._running
        if not self._turn.acquire(timeout=-1 if limit is None else limit):
            raise PoolBusyError(running or "something", time.monotonic() - began)
        self._running = name
        try:
            yield
        finally:
            self._running = ""
            self._turn.release()

    def _start_all(
        self, targets: Sequence[Target], start: Callable[[Target], Any], end: Callable[[Any], object], epoch: int
    ) -> list[list[Any]]:
        """Start something on every host, a list per slice; `end` ends what starts after a deadline or a close."""
        head, undo = self._reservation.head, lambda started: [end(one) for _, one in started]
        started = head.call(lambda: [(target.at, start(target)) for target in targets], undo=undo)
        if self._reservation.epoch != epoch:
            head.call(undo, started)
        self._reservation.check_open(epoch)
        return [*group_pairs(started).values()]


def arrange(nested: Iterable[Sequence[Any]], flatten: bool) -> list[Any]:
    """Return the values of all hosts in one list, or in one list per slice."""
    return [value for of_slice in nested for value in of_slice] if flatten else [list(one) for one in nested]
