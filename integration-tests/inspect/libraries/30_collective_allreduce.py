# SPDX-License-Identifier: Apache-2.0
"""ray.util.collective with gloo: rank 1 waits at a thread barrier for its loader, and rank 0 and 2 wait in allreduce."""

import threading

import ray
import torch
from hangs import mark, start_ray
from ray.util import collective

TRUTH = {
    "hangs": True,
    "library": "ray.util.collective",
    "guilty": "Rank actor 1",
    "function": "next_batch",
    "note": "threading.Barrier.wait for a loader thread that has ended; the others stand in a gloo allreduce",
}


@ray.remote
class Rank:
    def __init__(self, rank):
        self.rank = rank
        self.meet = threading.Barrier(2)
        self.loader = threading.Thread(target=self.load, args=(50 if rank != 1 else 8,), daemon=True)
        self.loader.start()

    def setup(self, size):
        collective.init_collective_group(size, self.rank, backend="gloo", group_name="ranks")

    def load(self, count):
        for i in range(count):
            self.batch = torch.full((4,), float(i))
            self.meet.wait()

    def next_batch(self):
        if not self.loader.is_alive():
            mark()
        self.meet.wait()
        return self.batch.clone()

    def train(self, steps):
        for _ in range(steps):
            gradient = self.next_batch()
            self.loader.join(0.2)
            collective.allreduce(gradient, group_name="ranks")
        return gradient.tolist()


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    ranks = [Rank.remote(rank) for rank in range(3)]
    ray.get([rank.setup.remote(3) for rank in ranks])
    print(ray.get([rank.train.remote(40) for rank in ranks]))
