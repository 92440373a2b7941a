# SPDX-License-Identifier: Apache-2.0
"""Somebody forgot a breakpoint() in a task, and Ray's debugger waits for a person to attach."""

import os

os.environ["RAY_DEBUG"] = "legacy"

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (ray debugger)",
    "guilty": "worker of the task check(6)",
    "function": "check",
    "note": "accept() in ray.util.rpdb, under check",
}


@ray.remote
def check(row):
    value = (row - 6) ** 2
    if value == 0:
        mark()
        breakpoint()
    return 1 / (value + 1)


@ray.remote
def summarize(*values):
    return sum(values)


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    print(ray.get(summarize.remote(*[check.remote(row) for row in range(12)])))
