# SPDX-License-Identifier: Apache-2.0
"""Random changes of a group against a model of its membership, with calls in flight and with kills.

`FAIRLEAD_EVENTS` sets the number of events.
"""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    Elastic,
    RayWorkerBuilder,
    RayWorkerGroup,
    ResizeTimeoutError,
    Restart,
    WorkerFailureError,
    WorkerGroupError,
    current_worker,
)
from fairlead_workergroup.testing import assert_no_leaks, kill

from ..hanging import hanging
from ..logged import Logged, check_logs

pytestmark = pytest.mark.nightly

EVENTS = int(os.environ.get("FAIRLEAD_EVENTS", "200"))
SEED = int(os.environ.get("FAIRLEAD_SOAK_SEED", "0"))
NAMES = ["grow", "grow", "shrink", "kill", "move", "hang", "drain", "disturb", "disturb"]
# After this many events another group continues.
EVENTS_OF_GROUP = 16
# With one slot for a rank that moves, five slots.
MOST = 4
SLOTS = 5
# No call and no event takes longer, also on a busy machine.
WITHIN_S = 90.0


class Worker(Logged):
    """A worker that says what it knows of its group."""

    def join(self):
        pass

    def facts(self, caller, number, seconds=0.0):
        run = self.step(caller, number)
        time.sleep(seconds)
        env = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_PORT"]
        return *run, current_worker().sharding.size, *env, os.getpid()


class Calls:
    """The calls of all groups, with what came of each."""

    def __init__(self):
        self.results, self.errors = {}, {}
        self.longest_s = 0.0
        self._count = 0

    def send(self, group, seconds=0.0):
        """Make a call; return its key and the call."""
        self._count += 1
        key = "driver", self._count
        try:
            return key, group.call("facts", *key, seconds)
        except WorkerFailureError as error:
            self.errors[key] = error
            raise

    def finish(self, key, call):
        """Return what all workers know, after they have run a call."""
        began = time.monotonic()
        try:
            facts = call.result(timeout=WITHIN_S)
        except WorkerFailureError as error:
            self.errors[key] = error
            raise
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.results[key] = [worker[:3] for worker in facts]
        return facts

    def ask(self, group):
        """Return what all workers know now."""
        return self.finish(*self.send(group))


class Model:
    """What the members of the group should be.

    Args:
        group: the group.
        rng: the source of the events.
        cluster: the cluster of the group.
        nodes: the nodes of the cluster, to which one can be added.
        eventually: waits for a condition.
        counts: counts the events.
        calls: the calls of all groups.
    """

    def __init__(self, group, rng, cluster, nodes, eventually, counts, calls):
        self.group, self.rng, self.calls = group, rng, calls
        self.cluster, self.nodes, self.eventually = cluster, nodes, eventually
        self.size, self.epoch = group.world_size, 0
        self.pids = [facts[-1] for facts in calls.ask(group)]
        self.dead = set()
        self.counts = counts
        self.names = []

    def grow(self):
        if self.size < MOST:
            self._resize(self.rng.randint(self.size + 1, MOST))

    def shrink(self):
        if self.size > 1:
            self._resize(self.rng.randint(1, self.size - 1))

    def _resize(self, size, slots=None):
        assert self.group.resize(dp=size, slots=slots) == self.epoch + 1
        self.pids = [None if rank in self.dead else pid for rank, pid in enumerate(self.pids[:size])]
        self.pids += [None] * (size - len(self.pids))
        self.size, self.dead = size, set()
        self.epoch += 1

    def kill(self):
        if living := sorted(set(range(self.size)) - self.dead):
            rank = self.rng.choice(living)
            kill(self.group, rank)
            self.dead.add(rank)

    def restart(self):
        lost = sorted(self.dead)
        assert self.group.restart_failed_workers() == lost
        self._move(lost)

    def move(self):
        rank = self.rng.randrange(self.size)
        self.dead.discard(rank)
        self.group.restart([rank], elsewhere=True)
        self._move([rank])

    def _move(self, ranks):
        for rank in ranks:
            self.pids[rank] = None
        self.dead -= set(ranks)
        self.epoch += bool(ranks)

    def drain(self):
        """A rank on a node that Ray drains moves to another node, which then ends."""
        if self.size == MOST or self.dead:
            return
        node = self.nodes.add_node(num_cpus=1)
        self.nodes.wait_for_nodes()
        extra = RayVirtualCluster([1], use_gpus=False, label_selector={"ray.io/node-id": node.node_id})
        self._resize(self.size + 1, extra.slots())
        self.group.get_worker_status()  # Ray starts no agent on a node that drains
        client = ray._private.worker.global_worker.gcs_client
        assert client.drain_node(node.node_id, 2, "maintenance", int((time.time() + 120) * 1000))[0]
        self.group.restart([self.size - 1], elsewhere=True)
        self._move([self.size - 1])
        assert self.eventually(lambda: not extra.groups(), 60)  # the restart has ended
        extra.shutdown()
        self.nodes.remove_node(node)

    def hang(self):
        """A worker that hangs and stays keeps a resize from beginning."""
        if self.size > 1 and not self.dead:
            with hanging(self.group, 0), pytest.raises(ResizeTimeoutError):
                self.group.resize(dp=1, timeout=0.5)

    def disturb(self):
        """A change that loses a worker at a random moment ends in one state, and the next restart repairs it."""
        size = self.rng.randint(1, MOST)
        before, pause_s, rank = self.size, self.rng.uniform(0, 1.5), self.rng.randrange(self.size)

        def kill_later():
            time.sleep(pause_s)
            with contextlib.suppress(IndexError, WorkerGroupError):  # the rank has left, or is being replaced
                kill(self.group, rank)
                self.counts["killed in a change"] += 1

        killer = threading.Thread(target=kill_later)
        killer.start()
        try:
            if size == before:
                self.group.restart([rank], elsewhere=True)
            else:
                self.group.resize(dp=size)
        except WorkerFailureError:
            self.counts["failed change"] += 1
        killer.join()
        self.group.restart_failed_workers()
        now = self.group.state()
        assert now.phase == "serving"
        assert len(now.members) in (before, size)
        assert now.group_epoch >= self.epoch
        self.size, self.epoch = len(now.members), now.group_epoch
        self.pids, self.dead = [None] * self.size, set()

    def check_in_flight(self, key, call, may_fail):
        """All workers have run a call in its epoch, with the facts of that epoch."""
        try:
            facts = self.calls.finish(key, call)
        except WorkerFailureError:
            assert may_fail
            self.counts["failed call"] += 1
            return
        assert [one[0] for one in facts] == list(range(len(facts)))
        assert {one[1] for one in facts} == {call.group_epoch}
        assert {size for one in facts for size in one[2:5]} == {len(facts)}
        self.counts["call in flight"] += 1

    def check(self):
        """The group is as the model says, unless workers are lost."""
        assert (self.group.state().group_epoch, self.group.world_size) == (self.epoch, self.size)
        if self.dead:
            return
        facts = self.calls.ask(self.group)
        port = str(self.group.master_port)
        expected = [(rank, self.epoch, self.size, self.size, self.size, port) for rank in range(self.size)]
        assert [one[:-1] for one in facts] == expected
        for rank, (before, now) in enumerate(zip(self.pids, facts, strict=True)):
            assert before in (None, now[-1]), f"rank {rank} has another process"
        self.pids = [one[-1] for one in facts]


def count_workers():
    """Return the number of processes below this one that are workers."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1]), command

    def is_ours(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid][0]
        return pid == os.getpid()

    return sum(command.startswith(b"ray::Worker") and is_ours(pid) for pid, (_, command) in parents.items())


@pytest.mark.timeout(240 + 15 * EVENTS)
def test_random_events(raylets, eventually, store_used, tmp_path):
    """No call mixes epochs or runs twice, none is late, and slots, ports, processes and memory are as before."""
    rng, counts, calls = random.Random(SEED), Counter(), Calls()
    longest_s = 0.0
    builder = RayWorkerBuilder(Worker, str(tmp_path))
    options = {
        "workers_per_node": [2],
        "elastic": Elastic(on_resize="join"),
        "restart": Restart(max_restarts=10**6),
    }
    options |= {"sharding_annotations": NamedSharding.from_shape(dp=2)}
    quiet = {"logging_level": "error", "log_to_driver": False}
    with raylets({"num_cpus": SLOTS}, **quiet) as nodes, assert_no_leaks():
        used = store_used()
        with RayVirtualCluster([SLOTS], use_gpus=False) as cluster:
            for first in range(0, EVENTS, EVENTS_OF_GROUP):
                with RayWorkerGroup(cluster, builder, **options) as group:
                    model = Model(group, rng, cluster, nodes, eventually, counts, calls)
                    for number in range(first, min(EVENTS, first + EVENTS_OF_GROUP)):
                        began = time.monotonic()
                        try:
                            run_event(model)
                            longest_s = max(longest_s, time.monotonic() - began)
                            assert longest_s < WITHIN_S
                        except BaseException as error:
                            error.add_note(f"event {number} of seed {SEED}; {dict(counts)}")
                            raise
                    assert group.shutdown()
            with RayWorkerGroup(cluster, builder) as group:  # in every slot
                assert len(calls.ask(group)) == SLOTS
        assert eventually(lambda: count_workers() == 0, 60)
        assert eventually(lambda: store_used() <= used, 60)
    check_logs(tmp_path, calls.results, calls.errors)
    counted = f"{EVENTS} events, seed {SEED}, {len(calls.results)} calls: {dict(sorted(counts.items()))}"
    print(f"\n{counted}; longest wait for a call {calls.longest_s:.1f} s, event {longest_s:.1f} s")  # noqa: T201


def run_event(model):
    """Change the group while calls are in flight, and compare it with the model."""
    rng = model.rng
    if not model.names:  # so that few events have all names too
        model.names = rng.sample(NAMES, len(NAMES))
    name = model.names.pop()
    if model.dead and name not in ("grow", "shrink"):
        name = "restart"
    may_fail = name in ("kill", "disturb") or bool(model.dead)
    calls = []
    with contextlib.suppress(WorkerFailureError):
        for _ in range(rng.randint(0, 3)):
            calls.append(model.calls.send(model.group, rng.choice([0.0, 0.1, 0.3])))
    try:
        getattr(model, name)()
        for key, call in calls:
            model.check_in_flight(key, call, may_fail)
        model.check()
    except BaseException as error:
        error.add_note(f"in {name!r}")
        raise
    model.counts[name] += 1
