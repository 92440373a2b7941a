# SPDX-License-Identifier: Apache-2.0
"""Calls of three callers while a group is resized, restarted and loses workers, checked in the logs of its workers."""

import asyncio
import contextlib
import logging
import os
import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    RayWorkerBuilder,
    RayWorkerGroup,
    Restart,
    StaleGroupError,
    WorkerFailureError,
    WorkerGroupError,
    current_worker,
)
from fairlead_workergroup.testing import kill

from ..faults import find_running

logger = logging.getLogger(__name__)

# No call may take longer: a worker restarts within seconds, also on a busy machine.
CALL_S = 120.0
SIZES = (1, 2, 3)


class Worker:
    """A worker that writes a line for each call that it runs; a line is written whole, or not at all."""

    def __init__(self, folder):
        self.log = os.open(f"{folder}/{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, caller, number):
        me = current_worker()
        os.write(self.log, f"{caller} {number} {me.rank} {me.group_epoch} {me.world_size}\n".encode())
        return me.rank, me.group_epoch, me.world_size


@dataclass
class Caller:
    """One source of calls: what came of each call, by its number."""

    name: str
    results: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    errors: dict[int, WorkerGroupError] = field(default_factory=dict)
    longest_s: float = 0.0
    count: int = 0

    @contextlib.contextmanager
    def call(self):
        """Number the next call, and keep the error of the group that it meets."""
        number, self.count = self.count, self.count + 1
        began = time.monotonic()
        try:
            yield number
        except (StaleGroupError, WorkerFailureError) as error:
            self.errors[number] = error
        self.longest_s = max(self.longest_s, time.monotonic() - began)


@dataclass
class Storm:
    """A group, the callers of it, and what disturbs them until the end."""

    group: RayWorkerGroup
    until: float
    callers: list[Caller] = field(default_factory=lambda: [Caller(name) for name in ("thread", "loop", "handle")])
    changes: list[str] = field(default_factory=list)
    kills: int = 0
    failed: list[BaseException] = field(default_factory=list)

    @property
    def is_over(self):
        return time.monotonic() > self.until

    def call_from_a_thread(self, caller, workers):
        while not self.is_over:
            with caller.call() as number:
                caller.results[number] = workers.call("step", caller.name, number, timeout=CALL_S).result()

    async def call_from_a_loop(self, caller):
        while not self.is_over:
            with caller.call() as number:
                caller.results[number] = await self.group.call("step", caller.name, number, timeout=CALL_S)

    def change(self):
        chance = random.Random(1)
        while not self.is_over:
            time.sleep(chance.random())
            size = chance.choice((*SIZES, None))
            try:
                if size is None:
                    self.group.restart_failed_workers()
                else:
                    self.group.resize(dp=size)
                self.changes.append("restart" if size is None else f"dp={size}")
            except WorkerGroupError as error:
                self.changes.append(type(error).__name__)

    def kill(self):
        chance = random.Random(2)
        while not self.is_over:
            time.sleep(2 * chance.random())
            with contextlib.suppress(IndexError, WorkerGroupError):  # the rank has left, or is being replaced
                kill(self.group, chance.randrange(self.group.world_size))
                self.kills += 1

    def run(self):
        """Let all of them run until the end; raise the first error that is none of the group's."""
        thread, loop, handle = self.callers

        def keep_error(work, *args):
            try:
                work(*args)
            except BaseException as error:  # noqa: BLE001  raised below
                self.failed.append(error)

        threads = [
            threading.Thread(target=keep_error, args=work, name=str(work[0]), daemon=True)
            for work in (
                (self.call_from_a_thread, thread, self.group),
                (lambda: asyncio.run(self.call_from_a_loop(loop)),),
                (self.call_from_a_thread, handle, self.group.handle()),
                (self.change,),
                (self.kill,),
            )
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(self.until - time.monotonic() + CALL_S)
        assert [one.name for one in threads if one.is_alive()] == []
        if self.failed:
            raise self.failed[0]


def read_logs(folder):
    """Return (rank, epoch, world size) of each run of a call, by caller and number; check the order in each worker."""
    runs = defaultdict(list)
    for log in folder.iterdir():
        last = {}
        for line in log.read_text().splitlines():
            caller, number, *what = line.split()
            number = int(number)
            assert last.get(caller, -1) < number, f"{log.name}: {caller} {number} ran after {last[caller]}"
            last[caller] = number
            runs[caller, number].append(tuple(map(int, what)))
    return runs


def check_call(key, runs, result, error):
    """Check what workers have run of one call against what its caller got."""
    ranks = {rank for rank, _, _ in runs}
    assert len(ranks) == len(runs), f"{key}: a worker ran it twice: {runs}"
    assert len({(epoch, size) for _, epoch, size in runs}) <= 1, f"{key}: it ran in two states of the group: {runs}"
    if error is None:
        assert sorted(runs) == result, f"{key}: its result {result} is not what has run: {runs}"
        (size,) = {size for _, _, size in result}
        assert [rank for rank, _, _ in result] == list(range(size)), f"{key}: wrong ranks: {result}"
    elif isinstance(error, StaleGroupError):
        assert ranks <= set(error.ran), f"{key}: {error}, but {runs}"
        assert not ranks & set(error.refused), f"{key}: {error}, but {runs}"
    else:
        assert error.failures, f"{key}: no worker is named: {error}"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=pytest.mark.nightly)])
def test_storm(tmp_path, eventually, seconds):
    """No call has a result of two states, runs twice, reaches wrong ranks or waits long, and nothing is left behind."""
    with RayVirtualCluster([max(SIZES)], use_gpus=False) as cluster:
        group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Worker, str(tmp_path)),
            [2],
            sharding_annotations=NamedSharding.from_shape(dp=2),
            restart=Restart(on_failure=True, max_restarts=1_000_000),
        )
        storm = Storm(group, time.monotonic() + seconds)
        try:
            storm.run()
        finally:
            ended = group.shutdown()
    runs = read_logs(tmp_path)
    for caller in storm.callers:
        for number in range(caller.count):
            key = caller.name, number
            check_call(key, runs.pop(key, []), caller.results.get(number), caller.errors.get(number))
        assert caller.results, f"{caller.name} had no result at all"
        assert caller.longest_s < CALL_S
    assert not runs, f"calls that nobody made: {list(runs)[:5]}"
    counts = [f"{len(one.results)} results and {len(one.errors)} errors of the {one.name}" for one in storm.callers]
    logger.info("%s; %d changes, %d kills", ", ".join(counts), len(storm.changes), storm.kills)
    assert ended
    assert storm.kills, "nothing was killed"
    assert {"dp=1", "dp=2", "dp=3"} & set(storm.changes), storm.changes
    assert eventually(lambda: find_running(int(log.stem) for log in tmp_path.iterdir()) == [])
