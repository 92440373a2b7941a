# SPDX-License-Identifier: Apache-2.0
"""Measure a restart, and growing against starting, in one run.

python benchmarks/bench_elastic.py
"""

import os
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

import ray
from _measure import Row, table

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_workergroup import RayWorkerGroup, Restart

WORKERS = 4
KILLS = 3
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
        return [_restart_row(), *_growth_rows()]
    finally:
        ray.shutdown()


def _restart_row() -> Row:
    """Return the median of the time from a kill to an answer of all ranks."""
    times = []
    options: dict[str, Any] = {"workers_per_node": [WORKERS], "restart": Restart(on_failure=True, max_restarts=100)}
    with RayVirtualCluster([WORKERS], use_gpus=False) as cluster:
        for _ in range(2):
            with RayWorkerGroup(cluster, Worker, **options) as group:
                for rank in range(1, 1 + KILLS):
                    group.call("nothing").result()
                    pid = group.get_worker_status()[rank].pid
                    began = time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
                    group.call("nothing", retries=5).result()
                    times.append(time.perf_counter() - began)
    what = "from SIGKILL of a worker to an answer of all, by a restart"
    return Row(what, f"{statistics.median(times):.2f} s", "", True)


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
