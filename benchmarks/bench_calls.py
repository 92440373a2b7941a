# SPDX-License-Identifier: Apache-2.0
"""Measure the start to the first answer, and calls by Ray and by a lane, against hand-written Ray in one run.

python benchmarks/bench_calls.py
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import ray
from _measure import Row, Timing, interleaved, table, take_turns
from bench_workergroup import WORKERS, start_by_hand, start_group

from fairlead_lane._local import LocalSocket
from fairlead_placement import init_ray
from fairlead_workergroup import RayWorkerGroup

# How many times faster a call by the lane has to be than hand-written Ray, by the number of workers.
LANE_RATIOS = {1: 1.8, 8: 5.0, 32: 5.0, 64: 4.5}
LANE_CPU_RATIO = 5.0
PAUSE_S = 2.0
# Calls of the same code differ by up to 4 % from one set of processes to the next, so several are measured, by the
# number of workers.
GROUPS = {8: 6, 32: 2}


def rows() -> list[Row]:
    """Return every row of the table. The run takes ten minutes."""
    init_ray(address="local", num_cpus=2 * max(LANE_RATIOS))
    try:
        calls = [row for count, groups in GROUPS.items() for row in _call_rows(count, groups)]
        return [*_first_answer_rows(), *calls, *_lane_rows()]
    finally:
        ray.shutdown()


def _first_answer_rows() -> Iterator[Row]:
    """Compare the time from nothing to the first answer of all with hand-written Ray."""

    def measure(start: Callable[[], AbstractContextManager[Any]], call: Callable[[Any], object]) -> float:
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        with start() as workers:
            call(workers)
            return time.perf_counter() - began

    def by_hand() -> float:
        return measure(start_by_hand, lambda workers: ray.get([worker.nothing.remote() for worker in workers]))

    def ours() -> float:
        return measure(start_group, lambda group: group.call("nothing").result())

    by_hand()
    ours()
    turns = [(by_hand(), ours()) for _ in range(7)]
    base, timing = map(Timing.of, zip(*turns, strict=True))
    ratio = timing.median / base.median
    yield Row(f"start of {WORKERS} workers to the first answer of all, by hand", str(base), "", True)
    yield Row("  by worker group", f"{ratio:.2f}x, {timing}", "at most 1.05x", ratio <= 1.05)


def _call_rows(count: int, groups: int) -> Iterator[Row]:
    """Compare calls by Ray with hand-written Ray."""
    times: list[list[float]] = [[], [], [], []]
    for _ in range(groups):
        with start_group(count) as group, start_by_hand(count) as workers:

            def by_hand(workers: list[Any] = workers) -> None:
                ray.get([worker.nothing.remote() for worker in workers])

            def ours(group: RayWorkerGroup = group) -> None:
                group.call("nothing").result()

            def classic(group: RayWorkerGroup = group) -> None:
                group.get_all_worker_results(group.run_all_workers_single_data("nothing"))

            interleaved(by_hand, ours, classic, repeats=50)  # warm up
            # The first call after those of other workers is slower.
            turns = take_turns(by_hand, by_hand, ours, classic, repeats=150, settles=True)
        for seconds, more in zip(times, turns, strict=True):
            seconds += more
    base, again, timing, classic_timing = map(Timing.of, times)
    yield Row(f"call without arguments to {count} workers, by hand", str(base), "", True)
    yield Row("  the same again, as a baseline", f"{again.median / base.median:.2f}x", "about 1x", True)
    for what, one in (("call", timing), ("the classic methods", classic_timing)):
        ratio = one.median / base.median
        yield Row(f"  by worker group, {what}", f"{ratio:.2f}x, {one}", "at most 1.15x", ratio <= 1.15)


def _lane_rows() -> Iterator[Row]:
    """Compare calls by the lane with hand-written Ray, in time and in the CPU time of the driver."""
    for count, least in LANE_RATIOS.items():
        with start_group(count) as group, start_by_hand(count) as workers:

            def by_hand(workers: list[Any] = workers) -> None:
                ray.get([worker.nothing.remote() for worker in workers])

            def ours(group: RayWorkerGroup = group) -> None:
                group.call("nothing").result()

            opened = []
            for _ in range(5):
                began = time.perf_counter()
                with group.lane():
                    opened.append(time.perf_counter() - began)
            with group.lane():
                # About a second of calls in a row, as in a loop. Ray writes the events of its calls for some time.
                calls = min(3_000, 8_000 // count)
                base, timing = interleaved(by_hand, ours, repeats=5, calls=calls, pause_s=PAUSE_S)
                by_hand_s, ours_s = _cpu_s(by_hand, calls), _cpu_s(ours, calls)
            ratio, cpu_ratio = base.median / timing.median, by_hand_s / ours_s
            yield Row(f"call without arguments to {count} worker(s), by hand", str(base), "", True)
            yield Row("  by the lane", f"{ratio:.1f}x faster, {timing}", f"at least {least:g}x", ratio >= least)
            value = f"{cpu_ratio:.1f}x less, {ours_s * 1e3:.2f} ms"
            if count < WORKERS:
                yield Row("  CPU time of the driver", value, "", True)
                continue
            yield Row("  CPU time of the driver", value, f"at least {LANE_CPU_RATIO:g}x", cpu_ratio >= LANE_CPU_RATIO)
            if count == WORKERS:
                median_s = statistics.median(opened[1:])
                yield Row("  opening the lane again", f"{median_s * 1e3:.0f} ms", "under 50 ms", median_s < 0.05)
                # The workers of other nodes cannot reach the Unix socket of the driver.
                with patch.object(LocalSocket, "complete", lambda _, config: config), group.lane():
                    (timing,) = interleaved(ours, repeats=5, calls=calls, pause_s=PAUSE_S)
                    ours_s = _cpu_s(ours, calls)
                value = f"{base.median / timing.median:.1f}x faster, {timing}"
                yield Row("  by the lane over TCP, as between nodes", value, "", True)
                value = f"{by_hand_s / ours_s:.1f}x less, {ours_s * 1e3:.2f} ms"
                yield Row("  CPU time of the driver over TCP", value, "", True)


def _cpu_s(function: Callable[[], None], repeats: int) -> float:
    """Return the CPU time of this process for one call of a function."""
    time.sleep(PAUSE_S)
    began = time.process_time()
    for _ in range(repeats):
        function()
    return (time.process_time() - began) / repeats


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
