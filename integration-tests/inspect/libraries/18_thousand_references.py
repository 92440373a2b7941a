# SPDX-License-Identifier: Apache-2.0
"""The driver gets 1,000 references at once; the 900th task searches with a step that rounds to nothing."""

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "worker of the task simulate(900)",
    "function": "find_root",
    "note": "endless bisection loop in pure Python; 999 of 1,000 tasks are done",
}


def find_root(seed):
    low, high = 0.0, 2.0 + seed
    tolerance = 1e-9 if seed != 900 else 1e-18
    if seed == 900:
        mark()
    while high - low > tolerance:
        middle = (low + high) / 2
        if middle * middle < 2.0:
            low = middle
        else:
            high = middle
    return low


@ray.remote
def simulate(seed):
    return find_root(seed)


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    references = [simulate.remote(seed) for seed in range(1000)]
    print(sum(ray.get(references)))
