# SPDX-License-Identifier: Apache-2.0
"""An actor with two concurrency groups takes two locks in opposite order in its two threads."""

import threading

import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (concurrency groups)",
    "guilty": "Store actor",
    "function": "step",
    "note": "threads of step and checkpoint in one process, each holds one lock and wants the other",
}


@ray.remote(concurrency_groups={"io": 1, "compute": 1})
class Store:
    def __init__(self):
        self.state_lock, self.disk_lock = threading.Lock(), threading.Lock()
        self.state = np.ones((400, 400))

    def work(self, rounds):
        return sum(np.linalg.norm(self.state @ self.state) for _ in range(rounds))

    @ray.method(concurrency_group="compute")
    def step(self, rounds):
        with self.state_lock:
            self.state = self.state * 0.99
            self.work(rounds)
            while not self.disk_lock.locked():
                self.work(1)
            mark()
            with self.disk_lock:
                np.save("state.npy", self.state)

    @ray.method(concurrency_group="io")
    def checkpoint(self, rounds):
        with self.disk_lock:
            self.work(rounds)
            with self.state_lock:
                np.save("checkpoint.npy", self.state)

    @ray.method(concurrency_group="io")
    def size(self):
        return self.state.size


if __name__ == "__main__":
    start_ray(num_cpus=2, object_store_memory=400_000_000)
    store = Store.remote()
    print(ray.get(store.size.remote()), flush=True)
    ray.get([store.step.remote(300), store.checkpoint.remote(300)])
