# SPDX-License-Identifier: Apache-2.0
"""Calls of three callers while a group is resized, restarted, moved and loses workers.

Logs say what each worker has run of each call, and are compared with what its caller got.
"""

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
SOAK_S = float(os.environ.get("FAIRLEAD_SOAK_S", "60"))


class Logged:
    """A worker that writes a line for each call that it runs; a line is written whole, or not at all."""

    def __init__(self, folder):
        self.log = os.open(f"{folder}/{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, caller, number):
        me = current_worker()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(me.rank), str(me.world_size))
        assert me.sharding.size == me.world_size
        os.write(self.log, f"{caller} {number} {me.rank} {me.group_epoch} {me.world_size}\n".encode())
        return me.rank, me.group_epoch, me.world_size


def read_logs(folder):
    """Return what has run of each call; check that each worker has run the calls of each caller in order."""
    runs = defaultdict(list)
    for log in folder.iterdir():
        last = {}
        for line in log.read_text().splitlines():
            caller, text, *what = line.split()
            number = int(text)
            assert last.get(caller, -1) < number, f"{log.name}: {caller} {number} ran after {last[caller]}"
            last[caller] = number
            rank, epoch, size = map(int, what)
            runs[caller, number].append((rank, epoch, size))
    return runs


def check_logs(folder, results, errors):
    """Check what workers have run of each call against what its caller got."""
    runs = read_logs(folder)
    for key in [*results, *errors]:
        _check_call(key, runs.pop(key, []), results.get(key), errors.get(key))
    assert not runs, f"calls that nobody made: {list(runs)[:5]}"


def _check_call(key, runs, result, error):
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
    changes: list[int | str] = field(default_factory=list)
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
            change = chance.choice((*SIZES, "restart", "move"))
            try:
                if change == "restart":
                    self.group.restart_failed_workers()
                elif change == "move":
                    self.group.restart([0], elsewhere=True)
                else:
                    self.group.resize(dp=change)
                self.changes.append(change)
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


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("seconds", [8, pytest.param(SOAK_S, marks=pytest.mark.nightly)])
@pytest.mark.timeout(300 + SOAK_S)
def test_storm(tmp_path, eventually, seconds, store_used):
    """No call has a result of two states, runs twice, reaches wrong ranks or waits long, and nothing is left behind."""
    used, builder = store_used(), RayWorkerBuilder(Logged, str(tmp_path))
    with RayVirtualCluster([max(SIZES) + 1], use_gpus=False) as cluster:  # with a slot for a rank that moves
        group = RayWorkerGroup(
            cluster,
            builder,
            [2],
            sharding_annotations=NamedSharding.from_shape(dp=2),
            restart=Restart(on_failure=True, max_restarts=1_000_000),
        )
        storm = Storm(group, time.monotonic() + seconds)
        try:
            storm.run()
            group.restart_failed_workers()
            assert group.state().phase == "serving"
        finally:
            ended = group.shutdown()
        with RayWorkerGroup(cluster, builder) as group:
            assert group.world_size == max(SIZES) + 1  # no slot is still held
    check_logs(
        tmp_path,
        {(caller.name, number): result for caller in storm.callers for number, result in caller.results.items()},
        {(caller.name, number): error for caller in storm.callers for number, error in caller.errors.items()},
    )
    for caller in storm.callers:
        assert caller.results, f"{caller.name} had no result at all"
        assert caller.longest_s < CALL_S
    counts = [f"{len(one.results)} results and {len(one.errors)} errors of the {one.name}" for one in storm.callers]
    longest_s = max(caller.longest_s for caller in storm.callers)
    logger.info(
        "%s; %d changes, %d kills; the longest call took %.1f s",
        ", ".join(counts),
        len(storm.changes),
        storm.kills,
        longest_s,
    )
    assert ended
    assert storm.kills, "nothing was killed"
    assert {*SIZES, "move"} & set(storm.changes), storm.changes
    assert eventually(lambda: find_running(int(log.stem) for log in tmp_path.iterdir()) == [])
    assert eventually(lambda: store_used() <= used, 60)
