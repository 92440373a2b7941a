# SPDX-License-Identifier: Apache-2.0
"""Measure large groups: 128 real workers on 8 nodes of this machine, and 8,192 simulated ones.

python benchmarks/bench_scale.py
"""

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from _idle import Worker
from _measure import Row, table, under
from _simulated import ActorClass, Agents, Answers, Head, make_slots
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, Shard
from fairlead_workergroup._arguments import Arguments
from fairlead_workergroup._calls.plan import CallOptions, make_columns, make_plan, make_requests
from fairlead_workergroup._membership.core import Core
from fairlead_workergroup._membership.places import lay_out
from fairlead_workergroup._membership.provision import WINDOW, create_actors, plan_workers, wait_started
from fairlead_workergroup._model import GroupState, Member, Restart
from fairlead_workergroup._start.worker_class import Method, WorkerClass
from fairlead_workergroup._status import read_statuses
from fairlead_workergroup._world import Deadline

NODES, PER_NODE, ROUNDS = 8, 16, 2
SIMULATED_NODES, SIMULATED_PER_NODE = 1_024, 8
# What Ray's head has been seen to register with 2,048 nodes; it registers more on this machine.
REGISTRATIONS_PER_S = 600.0
ROUND_TRIP_S = 0.005
CONSTRUCTOR_S = 0.5


def rows() -> list[Row]:
    """Return every row of the table. The run takes several minutes."""
    return [*simulated_rows(), *_real_rows()]


def simulated_rows() -> Iterator[Row]:
    """Measure the start, a call and a watch of workers that exist only in this process."""
    count = SIMULATED_NODES * SIMULATED_PER_NODE
    head = Head(REGISTRATIONS_PER_S, ROUND_TRIP_S)
    described = WorkerClass("bench.Worker", "Worker", {})
    described.__dict__["actor_class"] = ActorClass(head, Answers(), CONSTRUCTOR_S)
    sharding = NamedSharding.from_shape(dp=count // 8, tp=8)

    began, cpu = time.perf_counter(), time.process_time()
    places = lay_out(make_slots(SIMULATED_NODES, SIMULATED_PER_NODE), prefix="sim")
    places = tuple(replace(one, coords=sharding.get_worker_coords(one.rank)) for one in places)
    plans = plan_workers(places, described, env_vars={}, python={})
    planned_cpu = time.process_time() - cpu
    suffixes = [str(rank) for rank in range(count)]
    actors: dict[int, Any] = {}
    create_actors(
        plans,
        described,
        suffixes,
        lambda plan, actor: actors.update({plan.place.rank: actor}),
    )
    started = [actors[rank]._fairlead_start.remote({"rank": rank}, [], [], {}) for rank in range(count)]
    members = [
        Member(place, handle=actors[place.rank], actor_id=suffixes[place.rank], node_id=place.slot.node_id)
        for place in places
    ]
    wait_started(started, members, name="sim", until=Deadline.after(600.0), check=lambda: None)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu

    each, most = planned_cpu / count, head.most_waiting
    bound = count / REGISTRATIONS_PER_S + CONSTRUCTOR_S
    what = f"simulated: start of {count:,} workers, {REGISTRATIONS_PER_S:g} registrations/s, against the bound"
    yield Row(what, f"{took / bound:.2f}x, {took:.1f} s", "at most 1.2x", took <= 1.2 * bound)
    yield Row(
        "  simulated: requests that wait for the head at a time",
        str(most),
        f"<= {WINDOW}",
        most <= WINDOW,
    )
    yield Row(
        "  simulated: driver CPU of the start, fakes included",
        f"{cpu:.2f} s",
        "",
        True,
    )
    yield under("  simulated: of that, planning", f"{each * 1e6:.0f} us each", each, 150e-6)

    agents = Agents()
    core = Core("sim", places, sharding, policy=Restart())
    pid, tick = agents.process
    here = tuple(replace(one, pid=pid, started=tick) for one in members)
    core.commit(GroupState(0, 0, sharding, here, phase="serving"))

    yield from _call_rows(sharding, core.now.members)

    with agents.installed([place.slot.node_id for place in places]):
        statuses = read_statuses(core, 300.0)
    assert len(statuses) == count
    assert {status.state for status in statuses} == {"idle"}
    requests, moved = agents.requests, agents.bytes_moved / count
    yield Row("simulated: a look at them: requests", f"{requests:,}", "one a node", requests == SIMULATED_NODES)
    yield Row("  simulated: bytes there and back, per worker", f"{moved:.0f}", "under 100", moved < 100)


def _call_rows(sharding: NamedSharding, members: Sequence[Member]) -> Iterator[Row]:
    """Measure the plan, the requests and their sending to actors that pickle the arguments, and nothing of Ray."""
    method = Method("step", "plain", None)
    pieces = [np.zeros(1) for _ in range(sharding.shape["dp"])]

    def call() -> None:
        plan = make_plan(sharding, CallOptions(collect=("dp",)))
        batch, rate = Shard(pieces, "dp"), {"lr": 0.1}
        with patch.object(ray, "put", lambda value: value):
            columns = make_columns(method, [batch], rate, plan.column, Arguments().prepare)
        requests = make_requests(method, plan, columns, list(rate))
        for rank, request in zip(plan.called, requests, strict=True):
            getattr(members[rank].handle, request.method).remote(*request.args, **request.kwargs)

    call()
    cpu = []
    for _ in range(5):
        began = time.thread_time()
        call()
        cpu.append(time.thread_time() - began)
    took = statistics.median(cpu)
    what = f"simulated: driver CPU of a call of {len(members):,} workers without Ray"
    yield under(what, f"{took * 1e3:.0f} ms, {took / len(members) * 1e6:.0f} us each", took, 0.6)


def _real_rows() -> Iterator[Row]:
    """Start workers on several nodes of this machine, in turns by hand and by a group."""
    count = NODES * PER_NODE
    node = {"num_cpus": PER_NODE, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
        by_hand: list[float] = []
        ours: list[float] = []
        calls: list[float] = []
        _start_by_hand()  # it uses the processes that Ray has started in advance
        for _ in range(ROUNDS):
            by_hand.append(_start_by_hand())
            seconds, reserve_s, call_s = _start_group()
            ours.append(seconds)
            calls.append(call_s)
        ratio = statistics.median(ours) / statistics.median(by_hand)
        spread = f"{min(by_hand):.1f} to {max(by_hand):.1f} s"
        yield Row(f"start of {count} workers on {NODES} nodes, by hand", spread, "", True)
        measured = f"{ratio:.2f}x, {min(ours):.1f} to {max(ours):.1f} s"
        yield Row("  by worker group, reservation included", measured, "at most 1.15x", ratio <= 1.15)
        yield Row("  of that, the reservation", f"{reserve_s:.2f} s", "", True)
        yield Row(f"  a call of all {count}", f"{statistics.median(calls) * 1e3:.0f} ms", "", True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _start_by_hand() -> float:
    """Return the seconds that a start by hand takes, with a placement group per node."""
    nodes = [row["NodeID"] for row in ray.nodes() if row["Alive"]]
    began = time.perf_counter()
    groups = [
        placement_group([{"CPU": 1}] * PER_NODE, bundle_label_selector=[{"ray.io/node-id": node_id}] * PER_NODE)
        for node_id in nodes
    ]
    ray.get([group.ready() for group in groups])
    workers: list[Any] = [
        ray.remote(Worker).options(num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, at)).remote()
        for group in groups
        for at in range(PER_NODE)
    ]
    ray.get([worker.nothing.remote() for worker in workers])
    took = time.perf_counter() - began
    for worker in workers:
        ray.kill(worker)
    for group in groups:
        remove_placement_group(group)
    _wait_until_free()
    return took


def _start_group() -> tuple[float, float, float]:
    """Return the seconds that a group takes to start, its reservation, and a call."""
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(RayVirtualCluster([PER_NODE] * NODES, use_gpus=False))
        reserve_s = time.perf_counter() - began
        group = stack.enter_context(RayWorkerGroup(cluster, Worker))
        group.call("nothing").result()
        took = time.perf_counter() - began
        calls = []
        for _ in range(5):
            again = time.perf_counter()
            group.call("nothing").result()
            calls.append(time.perf_counter() - again)
    _wait_until_free()
    return took, reserve_s, statistics.median(calls)


def _wait_until_free() -> None:
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < NODES * PER_NODE:
        if time.monotonic() >= deadline:
            raise TimeoutError("the workers of the last start still hold CPUs after 60 s")
        time.sleep(0.1)
    time.sleep(2.0)  # Ray starts processes in the place of those that have ended


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
