# SPDX-License-Identifier: Apache-2.0
"""Synchronous parameter server: the prefetch thread of worker 1 died of an exception, and the worker waits on its queue."""

import queue
import threading

import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "Worker actor 1",
    "function": "compute_gradient",
    "note": "queue.Queue.get without timeout; the thread that fills it is dead",
}


@ray.remote
class ParameterServer:
    def __init__(self):
        self.weights = np.zeros(10)

    def update(self, *gradients):
        self.weights -= 0.1 * np.mean(gradients, axis=0)
        return self.weights


@ray.remote
class Worker:
    def __init__(self, rank):
        self.rank = rank
        self.batches = queue.Queue(maxsize=4)
        self.thread = threading.Thread(target=self.prefetch, daemon=True)
        self.thread.start()

    def prefetch(self):
        rng = np.random.default_rng(self.rank)
        for i in range(1_000_000):
            rows = rng.random((20, 10))
            if self.rank == 1 and i == 30:
                rows = rows.reshape(3, 10)
            self.batches.put(rows)

    def compute_gradient(self, weights):
        if not self.thread.is_alive() and self.batches.empty():
            mark()
        batch = self.batches.get()
        return batch.mean(axis=0) + 0.01 * weights


if __name__ == "__main__":
    start_ray(num_cpus=6, object_store_memory=400_000_000)
    server = ParameterServer.remote()
    workers = [Worker.remote(rank) for rank in range(4)]
    weights = server.update.remote(np.zeros(10))
    for i in range(2000):
        weights = server.update.remote(*[worker.compute_gradient.remote(weights) for worker in workers])
        if i % 10 == 0:
            print(i, ray.get(weights)[:3], flush=True)
