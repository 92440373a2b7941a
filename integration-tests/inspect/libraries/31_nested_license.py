# SPDX-License-Identifier: Apache-2.0
"""A task holds the only license and waits for a nested task that needs the same license."""

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (nested tasks)",
    "guilty": "nobody runs: the task solve_block waits for a resource",
    "function": None,
    "pending": "solve_block",
    "note": "its parent optimize holds license: 1 while it stands in ray.get",
}


@ray.remote(resources={"license": 1})
def solve_block(block):
    return sum(block)


@ray.remote(resources={"license": 1})
def optimize(blocks):
    if len(blocks) == 1:
        return sum(blocks[0])
    references = [solve_block.remote(block) for block in blocks]
    mark(pending="solve_block")
    return sum(ray.get(references))


@ray.remote
def study(size):
    blocks = [list(range(10))] * size
    return ray.get(optimize.remote(blocks))


if __name__ == "__main__":
    start_ray(
        num_cpus=4,
        resources={"license": 1},
        object_store_memory=400_000_000,
    )
    print(ray.get(study.remote(1)), flush=True)
    print(ray.get(study.remote(3)), flush=True)
