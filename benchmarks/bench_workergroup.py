# SPDX-License-Identifier: Apache-2.0
"""Measure how fast worker groups are, against hand-written Ray in one run.

python benchmarks/bench_workergroup.py
"""

import contextlib
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from _measure import Row, interleaved, table, under
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_placement.extension import run_on_nodes
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup, Restart, Shard, WorkerFailureError
from fairlead_workergroup._arguments import Arguments
from fairlead_workergroup._calls.plan import CallOptions, make_columns, make_plan, make_requests
from fairlead_workergroup._observe import query
from fairlead_workergroup._observe.query import ask_nodes
from fairlead_workergroup._remote import node as _node
from fairlead_workergroup._remote.process import start_tick
from fairlead_workergroup._start.worker_class import Method

WORKERS = 8


class Worker:
    """The worker that both sides run."""

    def nothing(self) -> None:
        return None

    def size(self, value: np.ndarray) -> int:
        return value.nbytes

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def give_back(self, value: np.ndarray) -> np.ndarray:
        return value

    def keep(self, value: np.ndarray) -> None:
        """Keep the value, as workers keep weights, so the object store cannot reuse the memory for the next call."""
        self.__dict__.setdefault("kept", []).append(value)


class Initializer:
    """An extra actor per worker that creates the worker, as other frameworks do to set its environment."""

    def create(self, rank: int, group: Any) -> Any:
        env_vars = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
        strategy = PlacementGroupSchedulingStrategy(group, rank, placement_group_capture_child_tasks=True)
        return (
            ray.remote(Worker)
            .options(num_cpus=1, runtime_env={"env_vars": env_vars}, scheduling_strategy=strategy)
            .remote()
        )


def rows() -> list[Row]:
    """Return every row of the table. The run takes two minutes."""
    init_ray(address="local", num_cpus=2 * WORKERS)
    try:
        results = [
            *_replication_rows(),
            *_sharding_rows(),
            *_start_rows(),
            *_plan_rows(),
            *_loss_rows(),
        ]
    finally:
        ray.shutdown()
    return [*results, *_status_rows()]


@contextlib.contextmanager
def start_group(workers: int = WORKERS) -> Iterator[RayWorkerGroup]:
    """Yield a group of these workers, on two axes."""
    axes = NamedSharding.from_shape(dp=2, tp=workers // 2) if workers > 1 else NamedSharding.from_shape(dp=1, tp=1)
    with (
        RayVirtualCluster([workers], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, sharding_annotations=axes) as group,
    ):
        yield group


@contextlib.contextmanager
def start_by_hand(count: int = WORKERS) -> Iterator[list[Any]]:
    """Yield as many actors in a placement group of their own."""
    group = placement_group([{"CPU": 1}] * count)
    ray.get(group.ready())
    strategies = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(count)]
    workers = [ray.remote(Worker).options(num_cpus=1, scheduling_strategy=one).remote() for one in strategies]
    ray.get([worker.nothing.remote() for worker in workers])
    yield workers
    for worker in workers:
        ray.kill(worker)
    remove_placement_group(group)


def _sharding_rows() -> Iterator[Row]:
    """Count the puts of pieces that are sharded over dp=2, with one result fetched per piece."""
    pieces = [np.ones(1_000_000), np.ones(1_000_000)]
    with start_group() as group, patch.object(ray, "put", wraps=ray.put) as put:
        group.call("give_back", Shard(pieces, "dp"), collect="dp").result()
    puts = put.call_count
    yield Row("8 MB pieces over dp=2, the same over tp=4: puts", str(puts), "2, one a piece", puts == 2)


def _plan_rows() -> Iterator[Row]:
    """Measure the cost of a call in the driver before it submits tasks, with a new plan and with a cached one."""
    method = Method("step", "plain", None)
    for workers, most in ((4_096, 0.020), (65_536, None)):
        axes = {"pp": workers // 512, "dp": 64, "tp": 8}
        ranks = np.random.default_rng(0).permutation(workers)
        pieces = [np.zeros(1) for _ in range(64)]
        for how in ("a new plan", "a plan that is known"):
            mesh = NamedSharding(ranks.reshape(*axes.values()), list(axes))

            def plan(again: bool = how != "a new plan") -> None:
                nonlocal mesh
                if not again:
                    make_plan.cache_clear()
                    mesh = NamedSharding(ranks.reshape(*axes.values()), list(axes))  # noqa: B023
                plan = make_plan(mesh, CallOptions(collect=("dp", "pp")))
                batch, rate = Shard(pieces, "dp"), {"lr": 0.1}  # noqa: B023
                with patch.object(ray, "put", lambda value: value):
                    columns = make_columns(method, [batch], rate, plan.column, Arguments().prepare)
                for _ in make_requests(method, plan, columns, list(rate)):
                    pass

            (timing,) = interleaved(plan, repeats=11)
            what = f"plan and arguments of a call of {workers:,} workers, {how}"
            yield Row(what, str(timing), "", True) if most is None else under(what, str(timing), timing.median, most)


def _replication_rows() -> Iterator[Row]:
    value = np.ones(4_000_000)  # 32 MB
    for method, how in (("keep", "that they keep"), ("size", "that they drop at once")):
        with start_group() as group, start_by_hand() as workers:

            def by_hand() -> None:
                ref = ray.put(value)
                ray.get([getattr(worker, method).remote(ref) for worker in workers])  # noqa: B023

            def ours() -> None:
                group.call(method, value).result()  # noqa: B023

            base, timing = interleaved(by_hand, ours, repeats=11)
            with patch.object(ray, "put", wraps=ray.put) as put:
                ours()
            puts = put.call_count
        ratio = timing.median / base.median
        yield Row(f"32 MB to {WORKERS} workers {how}, stored once by hand", str(base), "", True)
        yield Row("  by worker group", f"{ratio:.2f}x, {timing}", "at most 1.1x", ratio <= 1.1)
        yield Row("  puts of one such call", f"{puts:g}", "1", puts == 1)


def _start_rows() -> Iterator[Row]:
    def ours() -> None:
        with start_group() as group:
            group.call("nothing").result()

    def initializers() -> None:
        group = placement_group([{"CPU": 1}] * WORKERS)
        ray.get(group.ready())
        maker_class: Any = ray.remote(num_cpus=0)(Initializer)
        makers = [
            maker_class.options(runtime_env={"env_vars": {"MAKES": str(rank)}}).remote() for rank in range(WORKERS)
        ]
        workers = ray.get([maker.create.remote(rank, group) for rank, maker in enumerate(makers)])
        ray.get([worker.nothing.remote() for worker in workers])
        for actor in [*workers, *makers]:
            ray.kill(actor)
        remove_placement_group(group)

    ours()
    base, timing = interleaved(initializers, ours, repeats=5)
    ratio = base.median / timing.median
    yield Row(f"start of {WORKERS} workers, an initializer each", str(base), "", True)
    yield Row("  by worker group, end included", f"{ratio:.1f}x faster, {timing}", "at least 2.5x faster", ratio >= 2.5)


def _loss_rows() -> Iterator[Row]:
    """Measure the time from SIGKILL of a busy worker to the error, and to the next result after the restart."""
    seen, back = [], []
    with (
        RayVirtualCluster([WORKERS], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, restart=Restart(on_failure=True, max_restarts=100)) as group,
    ):
        for rank in range(WORKERS):
            call = group.call("sleep", 1.0)
            time.sleep(0.2)
            began = time.perf_counter()
            os.kill(group.get_worker_status()[rank].pid, signal.SIGKILL)
            with contextlib.suppress(WorkerFailureError):
                call.result()
                raise AssertionError("the call did not fail although a worker died")
            seen.append(time.perf_counter() - began)
            call.wait()
            began = time.perf_counter()
            group.call("nothing").result()
            back.append(time.perf_counter() - began)
    worst = max(seen)
    measured = f"{statistics.median(seen) * 1e3:.0f} ms, at worst {worst * 1e3:.0f} ms"
    yield Row("from SIGKILL of a worker to WorkerFailureError", measured, "under 2 s", worst < 2)
    yield Row("  and then to an answer of all, the rank started again", f"{statistics.median(back):.2f} s", "", True)


RECORDS = 64


# A separate process without threads runs this code, because it forks. Each child writes the record of a busy worker.
WRITERS = f"""
import os, signal, sys
from fairlead_workergroup._remote.record import Record
pids = []
for _ in range({RECORDS}):
    if (pid := os.fork()) == 0:
        record = Record(["__init__", "step"])
        record._task = lambda: b""
        record.begin(1)
        signal.pause()
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.read()
for pid in pids:
    os.kill(pid, signal.SIGKILL)
"""


@contextlib.contextmanager
def _start_record_writers() -> Iterator[list[int]]:
    """Start processes that have each written a record, and yield their pids."""
    command = [sys.executable, "-c", WRITERS]
    env = {**os.environ, "RAY_ENABLE_AUTO_CONNECT": "0"}  # Otherwise a record would start Ray in each process.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        yield [int(pid) for pid in parent.stdout.readline().split()]
        parent.communicate("", timeout=60)


def _status_rows() -> Iterator[Row]:
    """Measure the status of two workers on each of four raylets, alone and with the records of other processes."""
    with _start_record_writers() as pids:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            for _ in range(3):
                cluster.add_node(num_cpus=2)
                cluster.wait_for_nodes()
            ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
            with (
                RayVirtualCluster([2, 2, 2, 2], use_gpus=False) as reserved,
                RayWorkerGroup(reserved, Worker) as group,
            ):
                nodes = list(dict.fromkeys(worker["node_id"] for worker in group.worker_metadata))
                members = group.state().members
                facts = [
                    dataclasses.replace(members[0], node_id=nodes[rank % 4], pid=pid, started=start_tick(pid))
                    for rank, pid in enumerate(pids)
                ]
                facts += members

                def status() -> None:
                    group.get_worker_status()

                def read_all() -> None:
                    read = ask_nodes(facts, _node.look, 300.0, False)
                    assert sum(one.get("method") == "step" for one in read) == RECORDS

                for what, look in (
                    (f"status of {WORKERS} workers on 4 nodes", status),
                    (f"  the same with {RECORDS} records beside theirs", read_all),
                ):
                    look()
                    with patch.object(query, "run_on_nodes", wraps=run_on_nodes) as asked:
                        look()
                    count = sum(len(call.args[1]) for call in asked.call_args_list)
                    (timing,) = interleaved(look, repeats=50)
                    yield Row(f"{what}: requests", f"{count}, {timing}", "4, one a node", count == 4)
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
