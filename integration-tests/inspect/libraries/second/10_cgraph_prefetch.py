# SPDX-License-Identifier: Apache-2.0
"""A stage of a compiled graph waits at a local queue whose prefetch thread has died with an exception."""

import queue
import threading
import time

import numpy as np
import ray
from hangs import mark, start_ray
from ray.dag import InputNode

TRUTH = {
    "hangs": True,
    "library": "compiled graph",
    "guilty": "actor Lookup",
    "function": "join_rows",
    "note": "queue.Queue.get() without a producer; the Scorer actor and the driver wait at channels",
}


@ray.remote
class Lookup:
    def __init__(self, scales):
        self.rows = queue.Queue(maxsize=8)
        self.scales = scales
        threading.Thread(target=self.prefetch, daemon=True).start()
        time.sleep(0.5)

    def prefetch(self):
        for scale in self.scales:
            self.rows.put(np.full(256, 100 // scale, np.float32))

    def join_rows(self, batch):
        if self.rows.empty():
            mark()
        row = self.rows.get()
        return batch * row


@ray.remote
class Scorer:
    def score(self, batch):
        return float(batch.sum())


if __name__ == "__main__":
    start_ray(num_cpus=4)
    scales = [1 + number % 9 for number in range(20)] + [0] + [1 + number % 9 for number in range(200)]
    lookup, scorer = Lookup.remote(scales), Scorer.remote()
    with InputNode() as batch:
        graph = scorer.score.bind(lookup.join_rows.bind(batch))
    compiled = graph.experimental_compile()
    for step in range(100):
        result = compiled.execute(np.ones(256, np.float32))
        print(step, ray.get(result, timeout=1800))
        time.sleep(0.1)
    compiled.teardown()
