# SPDX-License-Identifier: Apache-2.0
"""Random changes of a group against a model of its membership, with calls in flight.

`FAIRLEAD_EVENTS` sets the number of events.
"""

import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    Elastic,
    RayWorkerGroup,
    ResizeTimeoutError,
    Restart,
    WorkerFailureError,
    current_worker,
)
from fairlead_workergroup.testing import assert_no_leaks, kill

from ..hanging import hanging

pytestmark = pytest.mark.nightly

EVENTS = int(os.environ.get("FAIRLEAD_EVENTS", "60"))
SEED = int(os.environ.get("FAIRLEAD_SOAK_SEED", "0"))
NAMES = ["grow", "grow", "shrink", "kill", "move", "hang", "drain"]
# After this many events another group continues.
EVENTS_OF_GROUP = 16
# With one slot for a rank that moves, five slots.
MOST = 4
SLOTS = 5


class Worker:
    """A worker that says what it knows of its group."""

    def __init__(self):
        self.joined = 0

    def join(self):
        self.joined += 1

    def facts(self, seconds=0.0):
        time.sleep(seconds)
        worker = current_worker()
        env = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_PORT"]
        return worker.rank, worker.group_epoch, worker.world_size, worker.sharding.size, *env, os.getpid()


class Model:
    """What the members of the group should be.

    Args:
        group: the group.
        rng: the source of the events.
        cluster: the cluster of the group.
        nodes: the nodes of the cluster, to which one can be added.
        eventually: waits for a condition.
        counts: counts the events.
    """

    def __init__(self, group, rng, cluster, nodes, eventually, counts):
        self.group, self.rng = group, rng
        self.cluster, self.nodes, self.eventually = cluster, nodes, eventually
        self.size, self.epoch = group.world_size, 0
        self.pids = [facts[-1] for facts in group.call("facts").result()]
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

    def check_in_flight(self, call, may_fail):
        """All workers have run a call in its epoch, with the facts of that epoch."""
        try:
            facts = call.result(timeout=120)
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
        facts = self.group.call("facts").result(timeout=120)
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
def test_random_events(raylets, eventually, store_used):
    """No call mixes epochs, and slots, ports, processes and memory are as before at the end."""
    rng, counts = random.Random(SEED), Counter()
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
                with RayWorkerGroup(cluster, Worker, **options) as group:
                    model = Model(group, rng, cluster, nodes, eventually, counts)
                    for number in range(first, min(EVENTS, first + EVENTS_OF_GROUP)):
                        try:
                            run_event(model)
                        except BaseException as error:
                            error.add_note(f"event {number} of seed {SEED}; {dict(counts)}")
                            raise
                    assert group.shutdown()
            with RayWorkerGroup(cluster, Worker) as group:  # in every slot
                assert len(group.call("facts").result()) == SLOTS
        assert eventually(lambda: count_workers() == 0, 60)
        assert eventually(lambda: store_used() <= used, 60)
    print(f"\n{EVENTS} events, seed {SEED}: {dict(sorted(counts.items()))}")  # noqa: T201


def run_event(model):
    """Change the group while calls are in flight, and compare it with the model."""
    rng = model.rng
    if not model.names:  # so that few events have all names too
        model.names = rng.sample(NAMES, len(NAMES))
    name = model.names.pop()
    if model.dead and name not in ("grow", "shrink"):
        name = "restart"
    may_fail = name == "kill" or bool(model.dead)
    calls = []
    with contextlib.suppress(WorkerFailureError):
        calls = [model.group.call("facts", rng.choice([0.0, 0.1, 0.3])) for _ in range(rng.randint(0, 3))]
    try:
        getattr(model, name)()
        for call in calls:
            model.check_in_flight(call, may_fail)
        model.check()
    except BaseException as error:
        error.add_note(f"in {name!r}")
        raise
    model.counts[name] += 1
