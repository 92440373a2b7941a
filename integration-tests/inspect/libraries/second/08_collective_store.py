# SPDX-License-Identifier: Apache-2.0
"""A single-threaded store actor polls for a version that can only be published by a call queued behind the poll."""

import time

import numpy as np
import ray
import ray.util.collective as collective
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "util.collective",
    "guilty": "actor VersionStore",
    "function": "wait_for",
    "note": "sleep loop in the actor blocks its own publish(); rank 1 waits for the actor, rank 0 waits for rank 1 in allreduce",
}


@ray.remote
class VersionStore:
    def __init__(self):
        self.version = 0

    def publish(self, version):
        self.version = version

    def wait_for(self, version):
        if self.version < version:
            mark()
            while self.version < version:
                time.sleep(0.5)
        return self.version


@ray.remote
class Worker:
    def __init__(self, rank, store):
        self.rank, self.store = rank, store
        self.grads = np.ones(1024, np.float32)

    def setup(self, size):
        collective.init_collective_group(size, self.rank, backend="gloo", group_name="workers")

    def train(self, steps):
        for step in range(1, steps + 1):
            if self.rank == 0:
                time.sleep(3.0)
                self.store.publish.remote(step)
            else:
                ray.get(self.store.wait_for.remote(step))
            collective.allreduce(self.grads, group_name="workers")
            self.grads /= 2
        return float(self.grads.sum())


if __name__ == "__main__":
    start_ray(num_cpus=4)
    store = VersionStore.remote()
    workers = [Worker.remote(rank, store) for rank in range(2)]
    ray.get([worker.setup.remote(2) for worker in workers])
    print(ray.get([worker.train.remote(5) for worker in workers]))
