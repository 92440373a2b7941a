# SPDX-License-Identifier: Apache-2.0
"""A pipeline of tasks ends in one that asks for a GPU, and the cluster has none."""

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "nobody: the task train_model is infeasible",
    "function": None,
    "pending": "train_model",
    "note": "needs 1 GPU; the task evaluate waits for its result, and the driver for evaluate",
}


@ray.remote
def prepare(i):
    return list(range(i))


@ray.remote(num_gpus=1)
def train_model(*parts):
    return sum(map(len, parts))


@ray.remote
def evaluate(model):
    return model * 0.5


if __name__ == "__main__":
    start_ray(num_cpus=2, object_store_memory=400_000_000)
    parts = [prepare.remote(i) for i in range(5)]
    ray.wait(parts, num_returns=5)
    score = evaluate.remote(train_model.remote(*parts))
    mark(pending="train_model")
    print(ray.get(score))
