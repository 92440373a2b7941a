# SPDX-License-Identifier: Apache-2.0
"""A worker, its axes and a view of the object store, which tests of calls share."""

import asyncio
import os
import time

import numpy as np
import ray

from fairlead_placement.extension import await_published
from fairlead_sharding import NamedSharding

# Rank 5 is at dp=0, tp=0, and so on: no test may depend on ascending ranks.
LAYOUT = [[5, 1, 6, 2], [0, 7, 3, 4]]
AXES = NamedSharding(LAYOUT, ["dp", "tp"])
MB = 1_000_000


class Worker:
    """A worker that returns, waits, fails and counts on request."""

    def __init__(self):
        self.ran = []
        self.number = int(os.environ["RANK"])

    def rank(self):
        return self.number

    def echo(self, *args, **kwargs):
        return args, kwargs

    def total(self, value):
        return float(sum(part.sum() for part in value) if isinstance(value, list) else value.sum())

    def make(self, megabytes):
        return np.full(megabytes * MB // 8, float(self.number))

    def fail(self, ranks):
        if self.rank() in ranks:
            raise ValueError(f"rank {self.rank()} would not")
        return "fine"

    def sleep(self, seconds, ranks=range(8), tag=None):
        self.ran.append(tag)
        if self.rank() in ranks:
            time.sleep(seconds)
        return tag

    def wait_for(self, gate, ranks=range(8), tag=None):
        """Wait on some ranks until a file exists."""
        self.ran.append(tag)
        while self.rank() in ranks and not os.path.exists(gate):
            time.sleep(0.01)
        return tag

    def hold(self, value):
        self.held = value

    def what_ran(self):
        return self.ran

    def items(self, count, pause_s=0.0):
        for i in range(count):
            time.sleep(pause_s)
            yield self.rank() * 100 + i

    def items_then_fail(self, count):
        yield from range(count)
        raise KeyError("no more")

    def items_then_die(self, ranks):
        yield 1
        if self.rank() in ranks:
            os._exit(1)

    def items_after(self, path):
        while not os.path.exists(path):
            time.sleep(0.01)
        yield 1

    def endless_items(self):
        while True:
            yield 1

    def items_that_wait(self, failing):
        if self.rank() in failing:
            raise KeyError(self.rank())
        yield self.rank()
        time.sleep(600)

    async def slow_echo(self, value, seconds=0.01):
        await asyncio.sleep(seconds)
        return value

    def with_our_names(self, collect, timeout, discard=None, retries=None):
        return collect, timeout, discard, retries

    def gathered_items(self, values):
        yield from values

    def die(self, ranks):
        if self.rank() in ranks:
            os._exit(1)

    def lose_a_child(self, ranks):
        if self.rank() in ranks:
            child = ray.remote(Child).options(num_cpus=0).remote()
            ray.get(child.die.remote())


class Child:
    def die(self):
        os._exit(1)


async def wait_for(call):
    """Wait for a call in a coroutine, which `asyncio.run` takes."""
    return await call


class Acting:
    """A value that does something when it is first pickled, which is between the plan of a call and its delivery."""

    def __init__(self, act):
        self.act = act

    def __reduce__(self):
        act, self.act = self.act, int
        act()
        return int, ()


def wait_until_published(group):
    """Wait until handles find on the board what a group has published last."""
    key = group._provisioner._publication.key
    assert await_published(key, timeout_s=60), "not published within 60 s"
