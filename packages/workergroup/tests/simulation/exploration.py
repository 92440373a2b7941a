# SPDX-License-Identifier: Apache-2.0
"""Run scripts with many lists of choices."""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .scheduler import SimulatedWorld

Script = Callable[[SimulatedWorld], object]

MOST_CHANGES = 3
# Steps in which the changes of priority lie; most faults need one in the first steps.
CHANGED_BY = 1000
# From this step on the tasks take turns, because the one of the highest priority may wait for another one in a loop.
FAIR_FROM = 5000
# A collection during a run would call finalizers between two points.
COLLECT_EVERY = 200


class Uniform:
    """Makes the choices of a run with equal probability."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def choose_next(self, options: Sequence[Any]) -> int:
        """Return the position of the task or source that runs next; the present task is the first, if it can run."""
        return int(self._random() * len(options))

    def choose_value(self, count: int) -> int:
        """Return a number below `count`."""
        return int(self._random() * count)


class Priorities(Uniform):
    """Chooses by a priority of each task and source, with few changes: this finds rare orders better.

    See Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._priority: dict[Any, float] = {}
        self._steps = 0
        # Small numbers as often as large ones.
        self._changes = {int(CHANGED_BY ** rng.random()) for _ in range(rng.randrange(MOST_CHANGES + 1))}

    def choose_next(self, options: Sequence[Any]) -> int:
        self._steps += 1
        if self._steps >= FAIR_FROM:
            return super().choose_next(options)
        known = self._priority
        for option in options:
            if option not in known:
                known[option] = self._random()
        if self._steps in self._changes:
            known[options[0]] = -self._random()
        best = max(options, key=known.__getitem__)
        return options.index(best)


def run(script: Script, chooser: Uniform) -> SimulatedWorld:
    """Run a script with some choices, and return its world."""
    world = SimulatedWorld(chooser)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        world.run(script)
    finally:
        if was_enabled:
            gc.enable()
    return world


def run_seed(script: Script, seed: int) -> SimulatedWorld:
    """Run a script with the choices of a seed: uniform ones for even seeds, and priorities for odd ones."""
    rng = random.Random(seed)
    return run(script, Priorities(rng) if seed % 2 else Uniform(rng))


def explore(script: Script, seeds: Iterable[int]) -> str:
    """Run a script with many seeds, until one fails; return its failure and its history, or an empty text."""
    with _on_one_processor():
        for count, seed in enumerate(seeds):
            world = run_seed(script, seed)
            if world.failure is not None:
                failure = f"{type(world.failure).__name__}: {world.failure}"
                return "\n".join([failure, *world.history, f"seed {seed}: {failure}"])
            if not count % COLLECT_EVERY:
                gc.collect()
    return ""


@contextlib.contextmanager
def _on_one_processor() -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on one processor: they hand over the baton in half the time."""
    before = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if before:
        os.sched_setaffinity(0, {before[os.getpid() % len(before)]})
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)
