# SPDX-License-Identifier: Apache-2.0
"""How fast worker groups are: ratios against hand-written Ray, measured in one run.

python benchmarks/bench_workergroup.py
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from _measure import Row, interleaved, table
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerGroup

WORKERS = 8


class Worker:
    """What both sides run."""

    def nothing(self) -> None:
        return None

    def size(self, value: np.ndarray) -> int:
        return value.nbytes

    def keep(self, value: np.ndarray) -> None:
        """As weights and data sets are kept: the store cannot use this memory again for the next call."""
        self.__dict__.setdefault("kept", []).append(value)


@ray.remote(num_cpus=0)
class Initializer:
    """The usual way: one more actor per worker, which creates it in an environment of its own."""

    def create(self, rank: int, group: Any) -> Any:
        env_vars = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
        strategy = PlacementGroupSchedulingStrategy(group, rank, placement_group_capture_child_tasks=True)
        return (
            ray.remote(Worker)
            .options(num_cpus=1, runtime_env={"env_vars": env_vars}, scheduling_strategy=strategy)
            .remote()
        )


def rows() -> list[Row]:
    """Every row of the table; takes two minutes."""
    init_ray(address="local", num_cpus=3 * WORKERS)
    try:
        return [*_calls(), *_replicated(), *_starts()]
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _ours() -> Iterator[RayWorkerGroup]:
    with (
        RayVirtualCluster([WORKERS], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, sharding_annotations=NamedSharding.from_shape(dp=2, tp=4)) as group,
    ):
        yield group


@contextlib.contextmanager
def _by_hand() -> Iterator[list[Any]]:
    group = placement_group([{"CPU": 1}] * WORKERS)
    ray.get(group.ready())
    strategies = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(WORKERS)]
    workers = [ray.remote(Worker).options(num_cpus=1, scheduling_strategy=one).remote() for one in strategies]
    ray.get([worker.nothing.remote() for worker in workers])
    yield workers
    for worker in workers:
        ray.kill(worker)
    remove_placement_group(group)


def _calls() -> Iterator[Row]:
    with _ours() as group, _by_hand() as workers:

        def by_hand() -> None:
            ray.get([worker.nothing.remote() for worker in workers])

        def ours() -> None:
            group.get_all_worker_results(group.run_all_workers_single_data("nothing"))

        interleaved(by_hand, ours, repeats=50)  # warm up
        base, again, timing = interleaved(by_hand, by_hand, ours, repeats=300)
        ratio = timing.median / base.median
        yield Row(f"call without arguments to {WORKERS} workers, by hand", str(base), "", True)
        yield Row("  the same again, as a baseline", f"{again.median / base.median:.2f}x", "about 1x", True)
        yield Row("  by worker group", f"{ratio:.2f}x, {timing}", "at most 1.15x", ratio <= 1.15)


def _replicated() -> Iterator[Row]:
    value = np.ones(4_000_000)  # 32 MB
    for method, how, repeats, least in (
        ("keep", "that they keep", 11, 5),
        ("size", "that they drop at once", 15, None),
    ):
        with _ours() as group, _by_hand() as workers:

            def by_value() -> None:
                ray.get([getattr(worker, method).remote(value) for worker in workers])  # noqa: B023

            def ours() -> None:
                group.get_all_worker_results(group.run_all_workers_single_data(method, value))  # noqa: B023

            before = group.statistics()
            base, timing = interleaved(by_value, ours, repeats=repeats)
            puts = (group.statistics().puts - before.puts) / repeats
        ratio = base.median / timing.median
        wanted = "" if least is None else f"at least {least}x faster"
        yield Row(f"32 MB to {WORKERS} workers {how}, by value", str(base), "", True)
        yield Row("  by worker group", f"{ratio:.1f}x faster, {timing}", wanted, least is None or ratio >= least)
        yield Row("  puts of one such call", f"{puts:g}", "1", puts == 1)


def _starts() -> Iterator[Row]:
    def ours() -> None:
        with _ours() as group:
            group.get_all_worker_results(group.run_all_workers_single_data("nothing"))

    def initializers() -> None:
        group = placement_group([{"CPU": 1}] * WORKERS)
        ray.get(group.ready())
        makers = [
            Initializer.options(runtime_env={"env_vars": {"MAKES": str(rank)}}).remote() for rank in range(WORKERS)
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


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
