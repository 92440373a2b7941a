# SPDX-License-Identifier: Apache-2.0
"""Healthy: consumers wait at a queue while the producer is still computing its next, expensive item."""

import numpy as np
import ray
from hangs import mark, start_ray
from ray.util.queue import Queue

TRUTH = {
    "hangs": False,
    "library": "util.queue",
    "guilty": None,
    "function": "price_paths",
    "note": "the producer task computes about half a minute to a minute for each item; idle consumers are normal",
}


def price_paths(seed, steps):
    rng = np.random.default_rng(seed)
    prices = np.full(200_000, 100.0)
    for step in range(steps):
        if seed == 0 and step == 50:
            mark()
        prices *= np.exp(rng.normal(0.0, 0.01, size=prices.shape))
    return prices


@ray.remote
def produce(queue, books, consumers):
    for seed in range(books):
        queue.put(price_paths(seed, 5000))
    for _ in range(consumers):
        queue.put(None)


@ray.remote
class Consumer:
    def __init__(self, queue):
        self.queue = queue

    def run(self):
        means = []
        while (prices := self.queue.get()) is not None:
            means.append(float(np.maximum(prices - 105.0, 0.0).mean()))
        return means


if __name__ == "__main__":
    start_ray(num_cpus=4)
    queue = Queue(maxsize=4)
    consumers = [Consumer.remote(queue) for _ in range(2)]
    results = [consumer.run.remote() for consumer in consumers]
    ray.get(produce.remote(queue, 20, len(consumers)))
    print(ray.get(results))
