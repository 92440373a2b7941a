# SPDX-License-Identifier: Apache-2.0
"""A pool: slices that are held from run to run, and the runs on them."""

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray.runtime_env import RuntimeEnv

from fairlead_placement import Slot, extension

from ._attempt import RunScope, Target, cancel_task, make_targets, run_once, start_actor, submit
from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._environment import make_slots
from ._head import NodeWatch, ask
from ._leases import Held
from ._reservation import Reservation
from ._retry import retry
from ._slices import SliceInfo
from ._verdicts import HostError, JobInfo, JobPreempted, JobStatus, JobSucceeded, failed_start, judge
from ._work import Class, Function, Work, check_call, inspect_work
from .exceptions import PoolBusyError

# After so many failed starts in a row on one host, other slices are preferred.
_STARTS = 2


@dataclass(frozen=True)
class PoolStatistics:
    """Counts of what a pool has done: attempts, those that failed or were preempted, and slices that were taken."""

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
        if not isinstance(tpu_type, AcceleratorConfigType):
            tpu_type = TpuAcceleratorConfig(tpu_type, 1 if num_slices is None else num_slices, **options)
        elif num_slices is not None:
            raise TypeError("Give the number of slices here or in the configuration (pod_count), not both.")
        self.config: AcceleratorConfigType = replace(tpu_type, **options)
        self._reservation = Reservation(self.config)
        # Whoever uses the slices has it: one run, or one change of their number, at a time.
        self._turn = threading.Lock()
        self._running = ""
        self._counts: Counter[str] = Counter()
        self._failed_starts: Counter[str] = Counter()  # in a row, by node
        extension.release_when_dropped(self, self._reservation.describe_leak, self._reservation.give_back)

    def __repr__(self) -> str:
        sizes = " or ".join(map(str, self._reservation.sizes))
        return f"SlicePool({sizes} x {self.config.kind}, {len(self.slices)} held)"

    def reserve(self) -> Self:
        """Reserve healthy slices: keep those that are held, and replace lost ones. After an error nothing is held.

        Raises:
            InsufficientSlicesError: not enough within the scale timeout.
            PortUnavailableError: a requested port is taken.
            PoolBusyError: something runs here, and the time to queue is over.
            HeadTimeoutError: Ray's head did not answer for 30 s.
        """
        self._reserve()
        return self

    def scale(self, num_slices: int | Sequence[int]) -> Self:
        """Hold another number of slices from now on. ValueError if it is not allowed, and the errors of `reserve`."""
        sizes = TpuAcceleratorConfig(pod_count=num_slices).sizes
        if not isinstance(self.config, TpuAcceleratorConfig) and sizes != self.config.sizes:
            raise ValueError(
                f"A pool on {self.config.kind} hosts is one group of workers: give worker_count, not a size."
            )
        with self._take_turn("scale") as epoch:
            self._reservation.sizes = sizes
            self._reservation.ensure(epoch)
        return self

    @property
    def slices(self) -> tuple[SliceInfo, ...]:
        """The slices that are held, in order; none before the first use."""
        return self._reservation.held.slices

    def slots(self) -> tuple[Slot, ...]:
        """Return every host as a slot of fairlead-placement, in the order of slices and TPU worker ids.

        A process in a slot has the variables in its `env`. While a worker group is on the slots, runs are refused.
        Raises the errors of `reserve`.
        """
        held = self._reserve()
        rows = ask("list the nodes", ray.nodes)
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
            ResourceInsufficientError: a worker group, or instances of a class, are on the slices.
            PreemptionLimitError: slices were lost once more than allowed.
            BaseException: the function's last exception, that of an accelerator that did not start, or the errors of
                `reserve`.
        """
        return self._run(function, args, kwargs)

    def run_on_first_hosts(self, function: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function like `run`, on worker 0 of each slice only."""
        return self._run(function, args, kwargs, first_hosts=True)

    def attempt(self, function: Function, /, *args: Any, **kwargs: Any) -> JobStatus:
        """Run a function once, as `run` does, and return the outcome as a value.

        Raises the errors of `run`, except those of the function and of lost slices.
        """
        with self._begin_run(function, args, kwargs) as (scope, epoch):
            return self._attempt(scope, epoch, 1)

    def submit(self, function: Function, /, *args: Any, **kwargs: Any) -> list[list[Any]]:
        """Start a function on every host and return references, a list per slice.

        Nothing is watched or repeated, and calls on one host run one by one. Raises a TypeError or a ValueError like
        `run`, and the errors of `reserve`; `ray.get` raises Ray's.
        """
        work = self.check(function, args, kwargs)
        with self._take_turn(work.name) as epoch:
            targets = make_targets(work, self.config, self._reservation.ensure(epoch))
            start = functools.partial(submit, payload=work.put(args, kwargs), own_process=True)
            return self._start_all(targets, start, cancel_task, epoch)

    def get(self, refs: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the values of references from `submit`, like `ray.get`; HeadTimeoutError if Ray's head is silent."""
        watch = NodeWatch()
        while True:
            try:
                values = iter(ray.get([ref for of_slice in refs for ref in of_slice], timeout=1.0))
                return arrange([[next(values) for _ in of_slice] for of_slice in refs], self.config.flatten)
            except ray.exceptions.GetTimeoutError as error:
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise  # the function's own
                watch.look(())

    def start(
        self, cls: Class, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[list[Any]], extension.SlotClaim]:
        """Start an actor for a class on every host; return the actors, a list per slice, and the claim on their slots.

        Raises the errors of `submit`, and ResourceInsufficientError if the slots are in use.
        """
        work = self.check(cls, args, kwargs, of_class=True)
        with self._take_turn(work.name) as epoch:
            held = self._reservation.ensure(epoch)
            claim = extension.claim_slots(held.slots, f"instances of {work.name}")
            try:
                start = functools.partial(start_actor, payload=work.put(args, kwargs))
                return self._start_all(make_targets(work, self.config, held), start, ray.kill, epoch), claim
            except BaseException:
                claim.release()
                raise

    def check(
        self, function: Function | Class, args: Sequence[Any], kwargs: Mapping[str, Any], *, of_class: bool = False
    ) -> Work:
        """Raise a TypeError or a ValueError if a function or class cannot be called here with these arguments."""
        work = inspect_work(function, of_class=of_class)
        check_call(work.name, work.function, args, kwargs)
        work.remote_options(self.config, None)
        RuntimeEnv(**work.environment(self.config)[1])  # Ray checks it here, and not only when the function starts.
        return work

    def close(self) -> bool:
        """Give everything back. Can be repeated; the next use reserves again.

        Returns whether Ray had everything back in time. If its head does not answer, a warning names the slices. They
        are returned in the background when the head answers again, or when the driver ends.
        """
        return self._reservation.close()

    def __enter__(self) -> Self:
        return self.reserve()

    def _run(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, first_hosts: bool = False
    ) -> list[Any]:
        failures, preemptions = self.config.max_retries_failure, self.config.max_retries_preemption
        with self._begin_run(function, args, kwargs) as (scope, epoch):
            attempt = functools.partial(self._attempt, scope, epoch, first_hosts=first_hosts)
            return list(retry(attempt, max_failures=failures, max_preemptions=preemptions).result)

    @contextlib.contextmanager
    def _begin_run(
        self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[RunScope, int]]:
        """Check a function, and wait for its turn."""
        work = self.check(function, args, kwargs)
        with self._take_turn(work.name) as epoch:
            start = functools.partial(self._reservation.start, epoch)
            yield RunScope(work, work.put(args, kwargs), NodeWatch(), start, self.config.grace_s), epoch

    def _attempt(self, scope: RunScope, epoch: int, number: int, *, first_hosts: bool = False) -> JobStatus:
        config, name = self.config, scope.work.name
        held = self._reservation.ensure(epoch)
        claim = extension.claim_slots(held.slots, f"run of {name}")
        began = time.monotonic()
        try:
            targets = make_targets(scope.work, config, held, first_hosts=first_hosts)
            self._counts["attempts"] += 1
            calls, errors = run_once(targets, scope)
        finally:
            claim.release()
        info = JobInfo(name, "succeeded", config.kind, held.slices, number, time.monotonic() - began)
        on_tpus = isinstance(config, TpuAcceleratorConfig)
        nodes = {target.node_id for target in targets}
        self._count_starts(errors if on_tpus else (), nodes)
        if not errors:
            values = extension.group_pairs((call.target.number, call.value) for call in calls).values()
            return JobSucceeded(info, arrange(values, config.flatten))
        status, dead = judge(info, errors, scope.watch.look(nodes)[1], accelerators=on_tpus)
        self._reservation.dead |= dead
        self._counts["preemptions" if isinstance(status, JobPreempted) else "failures"] += 1
        return status

    def _count_starts(self, errors: Sequence[HostError], nodes: set[str]) -> None:
        """Count failed starts in a row, and note which hosts are doubtful."""
        failed = {error.node_id for error in errors if failed_start(error.error)}
        for node_id in nodes:
            self._failed_starts[node_id] = self._failed_starts[node_id] + 1 if node_id in failed else 0
        doubtful = {node_id for node_id in nodes if self._failed_starts[node_id] >= _STARTS}
        self._reservation.doubtful = (self._reservation.doubtful - nodes) | doubtful

    def _reserve(self) -> Held:
        with self._take_turn("reserve") as epoch:
            return self._reservation.ensure(epoch)

    @contextlib.contextmanager
    def _take_turn(self, name: str) -> Iterator[int]:
        """Wait until nothing else runs in the pool, within the time to queue; give the epoch of the reservation."""
        limit, began, running = self.config.queue_timeout_s, time.monotonic(), self._running
        if not self._turn.acquire(timeout=-1 if limit is None else limit):
            raise PoolBusyError(running or "something", time.monotonic() - began)
        self._running = name
        try:
            yield self._reservation.epoch
        finally:
            self._running = ""
            self._turn.release()

    def _start_all(
        self, targets: Sequence[Target], start: Callable[[Target], Any], end: Callable[[Any], object], epoch: int
    ) -> list[list[Any]]:
        """Start something on every host, a list per slice; `end` ends what starts after a deadline or a close."""

        def undo(started: list[tuple[int, Any]]) -> None:
            for _, thing in started:
                end(thing)

        def start_all() -> list[tuple[int, Any]]:
            return [(target.number, start(target)) for target in targets]

        started = ask("start tasks", functools.partial(self._reservation.start, epoch, start_all), undo)
        return [*extension.group_pairs(started).values()]


def arrange(nested: Iterable[Sequence[Any]], flatten: bool) -> list[Any]:
    """Return the values of all hosts in one list, or in one list per slice."""
    return [value for of_slice in nested for value in of_slice] if flatten else [*map(list, nested)]
