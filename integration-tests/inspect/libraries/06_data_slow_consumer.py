# SPDX-License-Identifier: Apache-2.0
"""Healthy: Data is fast, but the driver trains on every batch for a while, so that the stages wait for it."""

import time

import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": False,
    "library": "data",
    "guilty": "driver, a slow consumer",
    "function": "train_on",
    "note": "matrix products on each batch, in the driver, with a pause for the rate limit; it makes progress",
}


def train_on(number, batch, weights):
    if number == 5:
        mark()
    for _ in range(4):
        weights = np.tanh(weights @ weights.T / 300 + batch["x"].mean())
        time.sleep(0.5)
    return weights


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    dataset = ray.data.range(20_000, override_num_blocks=100).map_batches(lambda b: {"x": b["id"] * 2.0})
    weights = np.ones((300, 300))
    for number, batch in enumerate(dataset.iter_batches(batch_size=200)):
        weights = train_on(number, batch, weights)
        print(number, weights.mean(), flush=True)
