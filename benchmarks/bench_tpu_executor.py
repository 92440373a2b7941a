# SPDX-License-Identifier: Apache-2.0
"""Measure how fast runs on slices are and how fast they recover, against hand-written Ray on pretend slices.

python benchmarks/bench_tpu_executor.py
"""

import functools
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from _measure import Row, table
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_tpu_executor import SlicePool, TpuRemoteManager
from fairlead_tpu_executor.testing import PretendSlices

BYTES = 10_000_000


def nothing() -> None:
    return None


def large() -> np.ndarray:
    return np.zeros(BYTES, dtype=np.uint8)


def rows() -> list[Row]:
    """Return every row of the table. The run takes two minutes."""
    with PretendSlices() as slices:
        slices.add_slice()
        return [*_call_rows(slices), *_retry_rows(), *_loss_rows(slices)]


def _by_hand(slices: PretendSlices) -> tuple[Any, Callable[..., list[Any]]]:
    """Return a placement group on the hosts, and a hand-written function that runs a function once on each host.

    With `always_new` no other task has the environment of the run. Otherwise the process may be one that another task
    has left idle, such as a task that the function started.
    """
    nodes = [slices.node_id("slice-1", worker) for worker in (0, 1)]
    group = placement_group(
        [{"CPU": 2, "TPU": 4}] * 2, bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in nodes]
    )
    ray.get(group.ready())

    def run(function: Callable[[], Any], *, always_new: bool = False) -> list[Any]:
        task = ray.remote(max_calls=1, max_retries=0, num_cpus=2, resources={"TPU": 4})(function)
        refs = []
        for worker in (0, 1):
            options: dict[str, Any] = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, worker)}
            if always_new:
                options["runtime_env"] = {"env_vars": {"WORKER": str(worker), "CALL": uuid.uuid4().hex}}
            refs.append(task.options(**options).remote())
        return list(ray.get(refs))

    return group, run


def _call_rows(slices: PretendSlices) -> Iterator[Row]:
    """Measure calls in turns. Both sides need the same chips, so each holds them for a few calls at a time."""
    seconds: dict[tuple[str, str], list[float]] = {}

    def measure(side: str, run: Callable[[Callable[[], Any]], Any]) -> None:
        run(nothing)  # The first call after the reservation is slower.
        for _ in range(4):
            for function in (nothing, large):
                start = time.perf_counter()
                run(function)
                seconds.setdefault((side, function.__name__), []).append(time.perf_counter() - start)

    for _ in range(5):
        group, run = _by_hand(slices)
        measure("by hand", run)
        measure("by hand, always new", functools.partial(run, always_new=True))
        remove_placement_group(group)
        with TpuRemoteManager("v4-16") as manager:
            measure("ours", manager.run_function)
    median = {key: float(np.median(times)) for key, times in seconds.items()}
    for function, what in (("nothing", "a call on 2 hosts"), ("large", "10 MB from each of 2 hosts")):
        idle, base = median["by hand", function], median["by hand, always new", function]
        ours = median["ours", function]
        yield Row(f"{what}, by hand, in idle processes", f"{idle * 1e3:.0f} ms", "", True)
        yield Row(f"{what}, by hand, always in new processes", f"{base * 1e3:.0f} ms", "", True)
        yield Row("  by a warm manager", f"{ours / base:.2f}x, {ours * 1e3:.0f} ms", "at most 1.1x", ours <= 1.1 * base)


def _retry_rows() -> Iterator[Row]:
    """Measure the time from the call, or from the failure, to the function's first line."""
    with tempfile.TemporaryDirectory() as folder:
        firsts, seconds = [], []
        for number in range(7):

            def fail_once(path: str) -> str:
                times = Path(path, os.environ["EXECUTOR_CALL_INDEX"])
                times.touch()
                with times.open("a") as file:
                    file.write(f"{time.time()}\n")
                if len(times.read_text().split()) == 1:
                    raise ValueError("the first time")
                return str(ray.get_runtime_context().get_node_id())

            path = Path(folder, str(number))
            path.mkdir()
            began = time.time()
            with SlicePool("v4-16") as pool:
                nodes = pool.run(fail_once, str(path))
                assert nodes == list(pool.slices[0].node_ids)
            first, second = ([float(line.split()[at]) for line in _read_files(path)] for at in (0, 1))
            firsts.append(max(first) - began)
            seconds.append(max(second) - max(first))
    base, again = float(np.median(firsts)), float(np.median(seconds))
    yield Row("the first start, slices reserved", f"{base * 1e3:.0f} ms", "", True)
    yield Row(
        "  the start after a failure, on the same nodes",
        f"{again / base:.2f}x, {again * 1e3:.0f} ms",
        "under 2x",
        again < 2 * base,
    )


def _read_files(path: Path) -> list[str]:
    return [one.read_text() for one in sorted(path.iterdir())]


def _loss_rows(slices: PretendSlices) -> Iterator[Row]:
    """Measure the time from Ray's report that a node is dead to a `JobPreempted`, with the other tasks ended."""
    delays = []
    for _ in range(3):
        name = slices.add_slice(kind="v5p-16")
        node_id = slices.node_id(name, 1)
        dead_at: list[float] = []

        def notice(node_id: str = node_id, dead_at: list[float] = dead_at) -> None:
            while any(row["NodeID"] == node_id and row["Alive"] for row in ray.nodes()):
                time.sleep(0.01)
            dead_at.append(time.monotonic())

        with SlicePool("v5p-16") as pool:
            threading.Timer(4.0, lambda name=name: slices.kill(name, 1)).start()
            watcher = threading.Thread(target=notice)
            watcher.start()
            status = pool.attempt(time.sleep, 600)
            assert type(status).__name__ == "JobPreempted", status
            ended = time.monotonic()
            watcher.join()
            delays.append(ended - dead_at[0])
        slices.remove(name)
    worst = max(delays)
    # A task may fail because of a dead node before the table of nodes shows it as dead.
    measured = f"{worst:.1f} s after Ray says so" if worst >= 0 else f"{-worst:.1f} s before Ray says so"
    yield Row("a dead host: siblings gone and a verdict, worst of 3", measured, "under 10 s after", worst < 10)


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
