# SPDX-License-Identifier: Apache-2.0
"""A worker and its helpers, which the tests of the classic calling methods share."""

import asyncio
import functools
import os
import sys
import time
import types

import ray

from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup

DP, TP = 2, 4


class OddError(ValueError):
    """An exception with two arguments, as exceptions that pickle badly have."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)
        self.number = number


def decorator(method):
    """Return a decorated method that passes `self` on as a positional argument, as most decorators do."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


class Recorder:
    """A worker that returns its arguments and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def echo(self, *args, **kwargs):
        self.calls += 1
        return args, kwargs

    def give(self, data, scale=1):
        self.calls += 1
        return None if data is None else data * scale

    @decorator
    def decorated(self, data, *, scale=1):
        return data * scale

    def count(self):
        return self.calls

    def rank(self):
        return int(os.environ["RANK"])

    def address_of(self, value):
        """Return which copy of the value this worker reads."""
        return value.ctypes.data, value.flags.writeable, float(value.sum())

    def reserved_names(self, method, worker_idx, run_rank_0_only_axes=None, common_kwargs=None, self_=None):
        return method, worker_idx, run_rank_0_only_axes, common_kwargs

    def fail(self, ranks, kind="value"):
        self.calls += 1
        if int(os.environ["RANK"]) in ranks:
            raise {"value": OddError("odd", 7), "key": KeyError("missing")}[kind]
        return "fine"

    def fail_unimportable(self):
        module = sys.modules["nowhere_else"] = types.ModuleType("nowhere_else")
        exec("class Unimportable(Exception): pass", module.__dict__)
        raise module.Unimportable("only here")

    def items(self, n, start=0):
        for i in range(n):
            yield start + i

    async def slowly(self, value):

        await asyncio.sleep(0.01)
        return value

    async def slow_items(self, n):

        for i in range(n):
            await asyncio.sleep(0.001)
            yield i

    @staticmethod
    def static(value):
        return value

    @classmethod
    def of_class(cls, value):
        return cls.__name__, value

    def child_and_own_group(self):
        def mine():
            return ray.util.get_current_placement_group().id.hex()

        return mine(), ray.get(ray.remote(num_cpus=0)(mine).remote())

    def sleep(self, seconds):
        time.sleep(seconds)

    def die(self):
        os._exit(1)

    def _private(self):
        return "never called"


AXES = NamedSharding.from_shape(dp=DP, tp=TP)
OVER_DP = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}


def calls(group: RayWorkerGroup) -> list[int]:
    return group.get_all_worker_results(group.run_all_workers_single_data("count"))


def results(group: RayWorkerGroup, *args, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_sharded_data(*args, **kwargs))
