# SPDX-License-Identifier: Apache-2.0
"""Measure the start to the first answer, and calls, against hand-written Ray in one run.

python benchmarks/bench_calls.py
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import Any

import ray
from _measure import Row, Timing, interleaved, table, take_turns
from bench_workergroup import WORKERS, start_by_hand, start_group

from fairlead_placement import init_ray
from fairlead_workergroup import RayWorkerGroup

PAUSE_S = 2.0
# Calls of the same code differ by up to 4 % from one set of processes to the next, so several are measured, by the
# number of workers.
GROUPS = {8: 6, 32: 2}


def rows() -> list[Row]:
    """Return every row of the table. The run takes minutes."""
    init_ray(address="local", num_cpus=2 * max(GROUPS))
    try:
        calls = [row for count, groups in GROUPS.items() for row in _call_rows(count, groups)]
        return [*_first_answer_rows(), *calls]
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
    """Compare calls with hand-written Ray, awaited ones with what somebody awaits by hand."""
    times: list[list[float]] = [[] for _ in range(6)]
    loop = asyncio.new_event_loop()
    for _ in range(groups):
        with start_group(count) as group, start_by_hand(count) as workers:

            def by_hand(workers: list[Any] = workers) -> None:
                ray.get([worker.nothing.remote() for worker in workers])

            def ours(group: RayWorkerGroup = group) -> None:
                group.call("nothing").result()

            def classic(group: RayWorkerGroup = group) -> None:
                group.get_all_worker_results(group.run_all_workers_single_data("nothing"))

            async def gather(workers: list[Any] = workers) -> None:
                await asyncio.gather(*(worker.nothing.remote() for worker in workers))

            async def await_call(group: RayWorkerGroup = group) -> None:
                await group.call("nothing")

            def on_loop(function: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
                return lambda: loop.run_until_complete(function())

            ways = (by_hand, by_hand, ours, classic, on_loop(gather), on_loop(await_call))
            interleaved(*ways, repeats=50)  # warm up
            # The first call after those of other workers is slower.
            turns = take_turns(*ways, repeats=150, settles=True)
        for seconds, more in zip(times, turns, strict=True):
            seconds += more
    loop.close()
    base, again, called, classic_timing, gathered, awaited = map(Timing.of, times)
    yield Row(f"call without arguments to {count} workers, by hand", str(base), "", True)
    yield Row("  the same again, as a baseline", f"{again.median / base.median:.2f}x", "about 1x", True)
    yield _against(base, "call", called, 1.15)
    yield _against(base, "the classic methods", classic_timing, 1.15)
    yield Row(f"call without arguments to {count} workers, awaited by hand", str(gathered), "", True)
    yield _against(gathered, "await", awaited, 1.25)


def _against(base: Timing, what: str, timing: Timing, most: float) -> Row:
    """Return the row of one way of a call."""
    ratio = timing.median / base.median
    return Row(f"  by worker group, {what}", f"{ratio:.2f}x, {timing}", f"at most {most}x", ratio <= most)


if __name__ == "__main__":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    print(table(rows()))
