# SPDX-License-Identifier: Apache-2.0
"""A reduce waits for eight preprocess tasks; one of them locks the same vocabulary file twice with flock."""

import fcntl
import os

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "worker of the task preprocess(5)",
    "function": "save_vocabulary",
    "note": "fcntl.flock on a second descriptor of a file that the same process has locked; reduce tasks wait for their arguments",
}


def save_vocabulary(path, words):
    with open(path, "a") as file:
        if len(words) > 5:
            mark()
        fcntl.flock(file, fcntl.LOCK_EX)
        file.writelines(word + "\n" for word in words)


@ray.remote
def preprocess(shard, folder):
    path = f"{folder}/vocabulary-{shard}"
    with open(path, "a+") as file:
        words = [f"word{i}" for i in range(shard + 1)]
        if len(words) == 6:
            fcntl.flock(file, fcntl.LOCK_EX)
            save_vocabulary(path, words)
    return len(words)


@ray.remote
def reduce(*counts):
    return sum(counts)


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    parts = [preprocess.remote(shard, os.getcwd()) for shard in range(8)]
    halves = [reduce.remote(*parts[:4]), reduce.remote(*parts[4:])]
    print(ray.get(reduce.remote(*halves)))
