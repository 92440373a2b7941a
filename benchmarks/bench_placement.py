# SPDX-License-Identifier: Apache-2.0
"""Measure how fast reservations are, against a hand-written placement group in one run.

python benchmarks/bench_placement.py
"""

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ray
from _measure import Row, interleaved, table, under
from bench_planner import planning_rows
from ray.util.placement_group import placement_group, remove_placement_group

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError, init_ray
from fairlead_placement._nodes.functions import run_tasks
from fairlead_placement._reserve import slots

BUNDLES = 8


def rows() -> list[Row]:
    """Return every row of the table. The run takes half a minute."""
    init_ray(address="local", num_cpus=2 * BUNDLES, num_gpus=BUNDLES)
    try:
        return [*_reservation_rows(), *_accelerator_rows(), *_refusal_rows(), *planning_rows()]
    finally:
        ray.shutdown()


def _reservation_rows() -> Iterator[Row]:
    seconds: dict[str, list[float]] = {"by hand": [], "ours": []}

    def wait_until_free() -> None:
        while ray.available_resources().get("CPU") != 2 * BUNDLES:
            time.sleep(0.005)

    def by_hand() -> None:
        start = time.perf_counter()
        group = placement_group([{"CPU": 1}] * BUNDLES)
        ray.get(group.ready())
        seconds["by hand"].append(time.perf_counter() - start)
        remove_placement_group(group)
        wait_until_free()

    def ours() -> None:
        start = time.perf_counter()
        cluster = RayVirtualCluster([BUNDLES], use_gpus=False)
        cluster.slots()
        seconds["ours"].append(time.perf_counter() - start)
        cluster.shutdown()
        wait_until_free()

    interleaved(by_hand, ours, repeats=52)
    base, mine = (sorted(times[2:])[25] for times in seconds.values())
    more = (mine - base) * 1e3
    yield Row(f"reserve {BUNDLES} bundles on a node, by hand", f"{base * 1e3:.1f} ms", "", True)
    yield Row("  by cluster, slots included", f"{more:+.1f} ms", "at most 10 ms more", more <= 10)


def _accelerator_rows() -> Iterator[Row]:
    """Count the tasks that read the ids of accelerators: one task for each bundle, all at once."""
    tasks: list[Any] = []

    def count(*args: Any, **options: Any) -> Any:
        outcomes = run_tasks(*args, **options)
        tasks.extend(outcomes)
        return outcomes

    with RayVirtualCluster([BUNDLES]) as warm:
        warm.slots()
    with mock.patch.object(slots, "run_tasks", count):
        start = time.perf_counter()
        with RayVirtualCluster([BUNDLES]) as cluster:
            cluster.slots()
            seconds = time.perf_counter() - start
    measured = f"{len(tasks)} tasks, {seconds:.2f} s"
    yield Row(f"reserve {BUNDLES} bundles with a GPU each", measured, "a task each", len(tasks) == BUNDLES)


def _refusal_rows() -> Iterator[Row]:
    start = time.perf_counter()
    try:
        RayVirtualCluster([1000], use_gpus=False).reserve()
    except ResourceInsufficientError as error:
        str(error)
    seconds = time.perf_counter() - start
    yield under("refuse what can never fit, message included", f"{seconds * 1e3:.1f} ms", seconds, 0.1)


if __name__ == "__main__":
    print(table(rows()))
