# SPDX-License-Identifier: Apache-2.0
"""A method that exits ends its worker, in every kind of worker."""

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Timeouts, WorkerFailureError, WorkerStartError

# A worker exits in a call, and in its constructor.
EXITING = """
    import sys
    import ray
    from fairlead_placement import RayVirtualCluster
    from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError, WorkerStartError

    class Worker:
        def __init__(self, exits=False):
            if exits:
                sys.exit(3)

        def leave(self):
            sys.exit(3)

    ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        with RayWorkerGroup(cluster, Worker) as group:
            try:
                group.call("leave", timeout=60).result()
            except WorkerFailureError as error:
                print("found", error.failures[0].kind, error.failures[0].exit_code)
        try:
            RayWorkerGroup(cluster, RayWorkerBuilder(Worker, True))
        except WorkerStartError as error:
            print("found", "lost while it started: exited" in str(error))
"""
EXITS = {"sys.exit": lambda: sys.exit(3), "exit_actor": ray.actor.exit_actor}
CODES = {"sys.exit": 3, "exit_actor": 0}
METHODS = ("leave", "leave_in_a_child", "async_items", "items")
HOWS = [*EXITS] * 2


class Worker:
    def __init__(self, how=None):
        if how is not None:
            EXITS[how]()

    async def leave(self, how):
        await asyncio.sleep(0)
        EXITS[how]()

    async def leave_in_a_child(self, how):
        await asyncio.gather(self.leave(how), self.wait())

    async def async_items(self, how):
        yield 1
        EXITS[how]()

    def items(self, how):
        yield 1
        EXITS[how]()

    async def wait(self):
        await asyncio.sleep(600)

    async def wait_with_items(self):
        yield 1
        await asyncio.sleep(600)

    async def echo(self, value):
        return value


@pytest.fixture
def start(local_ray):
    """Return a function that starts a group."""
    with contextlib.ExitStack() as stack:

        def start_group(size, *, overlaps=True):
            cluster = stack.enter_context(RayVirtualCluster([size], use_gpus=False))
            axes = NamedSharding.from_shape(dp=size)
            group = RayWorkerGroup(cluster, Worker, sharding_annotations=axes, async_communication=overlaps)
            return stack.enter_context(group)

        yield start_group


def find_failure(call, *, streams=False):
    """Return the kind and the exit code of the failure with which a call ends."""
    with pytest.raises(WorkerFailureError) as caught:
        list(call.stream()) if streams else call.result()
    (failure,) = caught.value.failures
    return failure.kind, failure.exit_code


def test_one_at_a_time(start):
    """An exit is reported with its code, whatever the kind of the method."""
    group, methods = start(2, overlaps=False), ("leave", "async_items")
    calls = [group.at(dp=rank).call(methods[rank], HOWS[rank], timeout=100) for rank in range(2)]
    assert [find_failure(call) for call in calls] == [("exited", CODES[how]) for how in HOWS[:2]]


def test_overlapping(start):
    """An exit ends a worker whose methods overlap, and with it the other methods that run there."""
    group = start(len(METHODS))
    for rank, (method, how) in enumerate(zip(METHODS, HOWS, strict=True)):
        worker = group.at(dp=rank)
        others = [worker.call("wait_with_items" if i % 2 else "wait", timeout=100) for i in range(20)]
        streamed = worker.call("wait_with_items", timeout=100)
        assert next(streamed.stream()).value == 1
        call = worker.call(method, how, timeout=100)
        assert {method: {find_failure(one)[0] for one in (call, *others)}} == {method: {"killed"}}
        assert find_failure(streamed, streams=True)[0] == "killed"
        with pytest.raises(WorkerFailureError):
            worker.call("echo", 1)


def test_late_news_of_an_exit(local_ray):
    """A worker has ended, with its code, also if Ray says first that it cannot be reached, as Ray does after 1 s."""
    env = {**os.environ, "RAY_timeout_ms_task_wait_for_death_info": "0"}
    command = [sys.executable, "-c", textwrap.dedent(EXITING), ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("found")]  # and what the node prints
    assert (done.returncode, found) == (0, ["found exited 3", "found True"]), done.stderr


@pytest.mark.parametrize(("how", "overlaps"), [("sys.exit", False), ("exit_actor", True)])
def test_constructor(cluster, how, overlaps):
    """An exit of a constructor fails the start of the group."""
    builder = RayWorkerBuilder(Worker, how)
    with pytest.raises(WorkerStartError, match=r"lost while it started: (exited|killed)"):
        RayWorkerGroup(
            cluster, builder, workers_per_node=1, async_communication=overlaps, timeouts=Timeouts(start_s=100)
        )
