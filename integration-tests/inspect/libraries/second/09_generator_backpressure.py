# SPDX-License-Identifier: Apache-2.0
"""The driver waits for a streaming generator to complete before it reads, but the generator is back-pressured until somebody reads."""

import os

import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "driver and generator task read_pages (deadlock)",
    "function": "collect",
    "note": "the driver stands in collect, the task in read_pages at its yield",
}


@ray.remote(_generator_backpressure_num_objects=4)
def read_pages(count):
    yield {"worker": os.getpid(), "pages": count}
    for page in range(count):
        yield np.full(20_000, page, np.float32)


@ray.remote
def summarize(page):
    return float(page.mean())


def collect(pages):
    header = ray.get(next(pages))
    mark(pids=[os.getpid(), header["worker"]])
    ray.get(pages.completed())
    return ray.get([summarize.remote(page) for page in pages])


if __name__ == "__main__":
    start_ray(num_cpus=4)
    print(sum(collect(read_pages.remote(40))))
