# SPDX-License-Identifier: Apache-2.0
"""A pool: slices that are held from run to run, and the runs on them."""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import ray
from ray.runtime_env import RuntimeEnv

from fairlead_placement import Slot, extension

from ._attempt import look_at_nodes, run_once, start
from ._config import AcceleratorConfigType, TpuAcceleratorConfig
from ._environment import make_slots, megascale_port
from ._reservation import Lease, Reservation
from ._slices import SliceInfo
from ._verdicts import JobInfo, JobStatus, JobSucceeded, failed_start, judge, retry
from ._work import Class, Function, Work, check_call, inspect_work


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

    def reserve(self) -> Self:
        """Reserve healthy slices: keep those that are held, and replace lost ones. After an error nothing is held.

        Raises:
            InsufficientSlicesError: not enough within the scale timeout.
            PortUnavailableError: worker 0 of a slice has no free port for its coordinator.
            HeadTimeoutError: Ray's head did not answer for 30 s.
        """
        with self._take_turn():
            self._reservation.ensure()
        return self

    def scale(self, num_slices: int | Sequence[int]) -> Self:
        """Hold another number of slices from now on. ValueError if it is not allowed, and the errors of `reserve`."""
        sizes = TpuAcceleratorConfig(pod_count=num_slices).sizes
        if not isinstance(self.config, TpuAcceleratorConfig) and sizes != self.config.sizes:
            raise ValueError(
                f"A pool on {self.config.kind} hosts is one group of workers: give worker_count, not a size."
            )
        with self._take_turn():
            self._reservation.sizes = sizes
            self._reservation.ensure()
        return self

    @property
    def slices(self) -> tuple[SliceInfo, ...]:
        """The slices that are held, in order; none before the first use."""
        return tuple(lease.slice for lease in self._reservation.leases)

    def slots(self) -> tuple[Slot, ...]:
        """Return every host as a slot of fairlead-placement, in the order of slices and TPU worker ids.

        A process in a slot has the variables in its `env`. While a worker group is on the slots, runs are refused.
        Raises the errors of `reserve`.
        """
        with self._take_turn():
            slots = make_slots(self.config, self._reservation.ensure())
        with extension.head_deadline():
            labels = {node.node_id: node.labels for node in extension.read_nodes()}
        return tuple(replace(slot, labels=labels.get(slot.node_id, {})) for slot in slots)

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
        work = self._check(function, args, kwargs)
        with self._take_turn():
            return self._attempt(work, 1)

    def submit(self, function: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Start a function on every host, and return references in the order of the results of `run`.

        Nothing is watched or repeated, and calls on one host run one by one. Raises a TypeError, a ValueError or a
        ResourceInsufficientError like `run`, and the errors of `reserve`; `ray.get` raises Ray's.
        """
        references, slots, claim = self.start(function, args, kwargs, of_class=False)
        claim.release()
        return arrange(references, slots, self.config.flatten)

    def start(
        self, target: Function | Class, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, of_class: bool = True
    ) -> tuple[list[Any], Sequence[Slot], extension.SlotClaim]:
        """Start an actor for a class, or a task for a function, on every host. Raises the errors of `submit`.

        Returns the actors or the references, their slots, and the claim on the slots.
        """
        work = self._check(target, args, kwargs, of_class=of_class)
        with self._take_turn(), self._claim(f"{'instances' if of_class else 'call'} of {work.name}") as claimed:
            leases, slots, claim = claimed
            # Ray would never end a task that comes after the end of its placement group.
            with self._reservation.lock:
                self._reservation.check_open()
                call = functools.partial(start, work, self.config, leases, of_class=of_class)
                return [*map(call, slots)], slots, claim

    def close(self) -> bool:
        """Give everything back. Can be repeated; the next use reserves again.

        Returns whether Ray had everything back in time. If its head does not answer, a warning names the slices. They
        are returned in the background when the head answers again, or when the driver ends.
        """
        self._reservation.is_open = False
        return self._reservation.give_back()

    def __enter__(self) -> Self:
        return self.reserve()

    def _check(
        self, target: Function | Class, args: Sequence[Any], kwargs: Mapping[str, Any], *, of_class: bool = False
    ) -> Work:
        """Store a function or class with its arguments for the hosts. Raises TypeError or ValueError."""
        work = inspect_work(target, of_class=of_class)
        check_call(work.name, work.function, args, kwargs)
        RuntimeEnv(**work.runtime_env(self.config))  # Ray checks it here, and not only when the function starts.
        megascale_port(self.config)
        return replace(work, payload=ray.put((work.function, args, kwargs)))

    def _run(
        self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, first_hosts: bool = False
    ) -> list[Any]:
        work, config = self._check(function, args, kwargs), self.config
        with self._take_turn():
            attempt = functools.partial(self._attempt, work, first_hosts=first_hosts)
            failures, preemptions = config.max_retries_failure, config.max_retries_preemption
            return list(retry(attempt, max_failures=failures, max_preemptions=preemptions).result)

    def _attempt(self, work: Work, number: int, *, first_hosts: bool = False) -> JobStatus:
        config, reservation = self.config, self._reservation
        with self._claim(f"run of {work.name}") as (leases, slots, claim):
            began = time.monotonic()
            slots = [slot for slot in slots if not first_hosts or slot.bundle_index == 0]
            call = functools.partial(start, work, config, leases)
            values, errors = run_once(leases, slots, call, config.grace_s, reservation.check_open)
            claim.release()
        places = tuple(lease.slice for lease in leases)
        info = JobInfo(work.name, "succeeded", config.kind, places, number, time.monotonic() - began)
        # After two failed starts in a row on one host, other slices are preferred.
        before = reservation.not_started
        reservation.not_started = {host.node_id for host in errors if failed_start(host.error)}
        reservation.doubtful |= before & reservation.not_started
        if not errors:
            reservation.doubtful.clear()
            return JobSucceeded(info, arrange(values, slots, config.flatten))
        status = judge(info, errors, look_at_nodes(slot.node_id for slot in slots)[1])
        reservation.dead |= {host.node_id for host in errors if host.is_of_dead_node}
        return status

    @contextlib.contextmanager
    def _take_turn(self) -> Iterator[None]:
        """Wait until nothing else runs in the pool, and open it."""
        with self._turn:
            self._reservation.is_open = True
            yield

    @contextlib.contextmanager
    def _claim(self, holder: str) -> Iterator[tuple[Sequence[Lease], Sequence[Slot], extension.SlotClaim]]:
        """Reserve slices and claim their hosts. An error ends the claim."""
        leases = self._reservation.ensure()
        slots = make_slots(self.config, leases)
        claim = extension.claim_slots(slots, holder)
        try:
            yield leases, slots, claim
        except BaseException:
            claim.release()
            raise


def arrange(values: Sequence[Any], slots: Sequence[Slot], flatten: bool) -> list[Any]:
    """Return the values of these hosts in one list, or in one list per slice."""
    pairs = ((slot.node_idx, value) for slot, value in zip(slots, values, strict=True))
    return [*values] if flatten else [*extension.group_pairs(pairs).values()]
