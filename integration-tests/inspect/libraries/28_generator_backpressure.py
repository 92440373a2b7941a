# SPDX-License-Identifier: Apache-2.0
"""A streaming generator may be two items ahead; the driver waits for its end before it takes the items."""

import os

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (streaming generator)",
    "guilty": "driver and generator worker, each waiting for the other",
    "function": "main",
    "note": "the driver stands in ray.get of the generator's completion, the generator in its backpressure",
}


@ray.remote(_generator_backpressure_num_objects=2)
def read_chunks(count):
    yield {"count": count, "host": os.uname().nodename, "pid": os.getpid()}
    for i in range(count):
        yield bytes(1000 + i)


def main():
    chunks = read_chunks.remote(20)
    header = ray.get(next(chunks))
    print(header, flush=True)
    mark(pids=[header["pid"]])
    ray.get(chunks.completed())
    print(sum(len(ray.get(chunk)) for chunk in chunks))


if __name__ == "__main__":
    start_ray(num_cpus=2, object_store_memory=400_000_000)
    main()
