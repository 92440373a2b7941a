# SPDX-License-Identifier: Apache-2.0
"""Run scripts with many lists of choices."""

import contextlib
import gc
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .scheduler import Chooser, SimulatedWorld

Script = Callable[[SimulatedWorld], object]

MOST_CHANGES = 3
# Steps in which the changes of priority lie; most faults need one in the first steps.
CHANGED_BY = 1000
# From this step on the tasks take turns, because the one of the highest priority may wait for another one in a loop.
FAIR_FROM = 5000
# A collection during a run would call finalizers between two points.
COLLECT_EVERY = 200


class Uniform:
    """Chooses with equal probability."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def choose_next(self, options: Sequence[Any]) -> int:
        return int(self._random() * len(options))

    def choose_value(self, count: int) -> int:
        return int(self._random() * count)


class Priorities:
    """Chooses by a priority of each task and source, with few changes: this finds rare orders better.

    See Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010.
    """

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        self._priority: dict[Any, float] = {}
        self._steps = 0
        # Small numbers as often as large ones.
        self._changes = {int(CHANGED_BY ** rng.random()) for _ in range(rng.randrange(MOST_CHANGES + 1))}

    def choose_next(self, options: Sequence[Any]) -> int:
        self._steps += 1
        if self._steps >= FAIR_FROM:
            return int(self._random() * len(options))
        known = self._priority
        for one in options:
            if one not in known:
                known[one] = self._random()
        if self._steps in self._changes:
            known[options[0]] = -self._random()
        best = max(options, key=known.__getitem__)
        return options.index(best)

    def choose_value(self, count: int) -> int:
        return int(self._random() * count)


class Recorded:
    """Makes the choices of an earlier run; when they are used up, each task runs until it waits."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = iter(choices)

    def choose_next(self, options: Sequence[Any]) -> int:
        return next(self._choices, 0) % len(options)

    def choose_value(self, count: int) -> int:
        return next(self._choices, 0) % count


@dataclass(frozen=True)
class Run:
    """One run of a script.

    Attributes:
        choices: the choices that it made.
        steps: the number of times that a task or an event was chosen.
        failure: the error that it ended with; None if it succeeded.
        history: everything that happened, as text.
    """

    choices: bytes
    steps: int
    failure: BaseException | None
    history: tuple[str, ...] = ()


def run(script: Script, chooser: Chooser, *, keep: bool = False) -> Run:
    """Run a script with some choices; with `keep`, the history of a run that succeeds is returned too."""
    world = SimulatedWorld(chooser)
    failure: BaseException | None = None
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        world.run(script)
    except BaseException as error:
        if error is not world.failure:  # an interrupt of the simulation itself
            raise
        failure = error
    finally:
        if was_enabled:
            gc.enable()
    history = tuple(map(str, world.history)) if failure is not None or keep else ()
    return Run(bytes(world.choices), world.steps, failure, history)


def run_seed(script: Script, seed: int, *, keep: bool = False) -> Run:
    """Run a script with the choices of a seed: uniform ones for even seeds, and priorities for odd ones."""
    rng = random.Random(seed)
    return run(script, Priorities(rng) if seed % 2 else Uniform(rng), keep=keep)


@dataclass(frozen=True)
class Report:
    """What many runs have shown.

    Attributes:
        runs: the number of runs.
        steps: the number of their steps.
        distinct: the number of different lists of choices.
        seconds: how long they took.
        cpu_s: the processor time that they took.
        seed: the seed of the run that failed; None if none did.
        failed: that run.
    """

    runs: int
    steps: int
    distinct: int
    seconds: float
    cpu_s: float
    seed: int | None = None
    failed: Run | None = None

    def __str__(self) -> str:
        each = 1e6 * self.seconds / max(1, self.steps)
        return (
            f"{self.runs:,} runs ({self.distinct:,} different) of {self.steps / max(1, self.runs):.0f} steps in "
            f"{self.seconds:.1f} s: {self.runs / max(1e-9, self.seconds):.0f} a second, {each:.1f} us a step, "
            f"{self.cpu_s:.1f} s of CPU"
        )


def explore(script: Script, seeds: Iterable[int], processor: int | None = None) -> Report:
    """Run a script with many seeds, until one fails, on one processor, whose number counts round the available ones."""
    began, cpu = time.perf_counter(), time.process_time()
    steps, count, seen = 0, 0, set[bytes]()

    def report(seed: int | None = None, failed: Run | None = None) -> Report:
        took, used = time.perf_counter() - began, time.process_time() - cpu
        return Report(count, steps, len(seen), took, used, seed, failed)

    with _on_one_processor(os.getpid() if processor is None else processor):
        for seed in seeds:
            one = run_seed(script, seed)
            count, steps = count + 1, steps + one.steps
            seen.add(one.choices)
            if one.failure is not None:
                return report(seed, one)
            if not count % COLLECT_EVERY:
                gc.collect()
    return report()


@contextlib.contextmanager
def _on_one_processor(number: int) -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on one processor: they hand over the baton in half the time."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if before:
        os.sched_setaffinity(0, {sorted(before)[number % len(before)]})
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def describe(seed: int | None, failed: Run) -> str:
    """Return the failure of a run with its history, for people."""
    failure = f"{type(failed.failure).__name__}: {failed.failure}"
    lines = [failure]
    if seed is not None:
        lines.append(f"Replay it with `python -m simulation --seed {seed}` in packages/workergroup/tests.")
    return "\n".join([*lines, *failed.history, failure])
