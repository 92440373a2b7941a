# SPDX-License-Identifier: Apache-2.0
"""Measure a restart against a plain actor, and growing against starting, in one run.

python benchmarks/bench_elastic.py
"""

import os
import signal
import statistics
import time
from collections.abc import Iterator

import ray
from _measure import Row, table

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_workergroup import RayWorkerGroup, Restart, WorkerFailureError

WORKERS = 4
ROUNDS = 5


class Worker:
    """A worker whose constructor takes a few milliseconds."""

    def __init__(self) -> None:
        time.sleep(0.005)

    def nothing(self) -> None:
        return None


def rows() -> list[Row]:
    """Return every row of the table. The run takes a minute."""
    init_ray(address="local", num_cpus=2 * WORKERS)
    try:
        return [*_restart_rows(), *_growth_rows()]
    finally:
        ray.shutdown()


def _restart_rows() -> Iterator[Row]:
    """Compare a restart with the creation of one plain actor of the class, in turns."""
    plain = ray.remote(num_cpus=0)(Worker)
    restarts, creations = [], []
    restart = Restart(on_failure=True, max_restarts=ROUNDS)
    with (
        RayVirtualCluster([WORKERS], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, workers_per_node=[WORKERS], restart=restart) as group,
    ):
        for turn in range(ROUNDS):
            os.kill(group.get_worker_status()[turn % WORKERS].pid, signal.SIGKILL)
            try:
                group.call("nothing").result()
                raise RuntimeError("the call of a killed worker succeeded")
            except WorkerFailureError:
                began = time.perf_counter()
            group.call("nothing").result()
            restarts.append(time.perf_counter() - began)

            began = time.perf_counter()
            actor = plain.remote()
            ray.get(actor.nothing.remote())
            creations.append(time.perf_counter() - began)
            ray.kill(actor)
    base, timing = statistics.median(creations), statistics.median(restarts)
    yield Row("one plain actor of the class: creation and a call", f"{base:.2f} s", "", True)
    what = "  from WorkerFailureError to an answer of all, by a restart"
    yield Row(what, f"{timing / base:.2f}x, {timing:.2f} s", "at most 1.2x", timing <= 1.2 * base)


def _growth_rows() -> Iterator[Row]:
    grown, started = [], []
    for _ in range(ROUNDS):
        with RayVirtualCluster([2 * WORKERS], use_gpus=False) as cluster:
            with RayWorkerGroup(cluster, Worker, workers_per_node=[WORKERS]) as group:
                group.call("nothing").result()
                began = time.perf_counter()
                group.resize(worker=2 * WORKERS)
                grown.append(time.perf_counter() - began)
            began = time.perf_counter()
            with RayWorkerGroup(cluster, Worker, workers_per_node=[WORKERS]):
                started.append(time.perf_counter() - began)
    base, timing = statistics.median(started), statistics.median(grown)
    yield Row(f"start of {WORKERS} workers", f"{base:.2f} s", "", True)
    limit = 1.1 * base + 0.1
    yield Row(f"  growing by {WORKERS} workers", f"{timing:.2f} s", "at most 1.1x plus 0.1 s", timing <= limit)


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
