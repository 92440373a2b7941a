# SPDX-License-Identifier: Apache-2.0
"""Dask on Ray: a task uses a thread pool of one thread, whose job submits another job to the same pool and waits."""

from concurrent.futures import ThreadPoolExecutor

import dask
from hangs import mark, start_ray
from ray.util.dask import ray_dask_get

TRUTH = {
    "hangs": True,
    "library": "dask on ray",
    "guilty": "worker of the dask task clean(3)",
    "function": "parse_chunk",
    "note": "a non-main thread of the worker stands in Future.result, the main thread too",
}


def decode(chunk):
    return [value % 13 for value in chunk]


def parse_chunk(pool, chunk):
    if len(chunk) <= 300:
        return decode(chunk)
    future = pool.submit(decode, chunk)
    mark()
    return future.result()


@dask.delayed
def clean(part):
    with ThreadPoolExecutor(max_workers=1) as pool:
        return sum(pool.submit(parse_chunk, pool, list(range(part * 100 + 10))).result())


@dask.delayed
def total(values):
    return sum(values)


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    print(total([clean(part) for part in range(4)]).compute(scheduler=ray_dask_get))
