# SPDX-License-Identifier: Apache-2.0
"""A Data actor UDF takes a plain lock twice: once in __call__ and once more in the cache that it refreshes."""

import threading

import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "data",
    "guilty": "actor of map_batches(Embedder)",
    "function": "refresh",
    "note": "threading.Lock taken twice by one thread, under __call__",
}


class Embedder:
    def __init__(self):
        self.lock = threading.Lock()
        self.cache = {}

    def refresh(self):
        mark()
        with self.lock:
            self.cache.clear()

    def __call__(self, batch):
        with self.lock:
            for key in batch["id"]:
                self.cache[int(key)] = np.full(4, key)
            if len(self.cache) > 200:
                self.refresh()
            batch["vector"] = np.stack([self.cache[int(key)] for key in batch["id"]])
        return batch


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    dataset = ray.data.range(2000, override_num_blocks=20).map_batches(Embedder, batch_size=50, concurrency=1)
    print(dataset.materialize().count())
