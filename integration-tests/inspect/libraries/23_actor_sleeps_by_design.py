# SPDX-License-Identifier: Apache-2.0
"""Healthy: a poller actor sleeps 300 s between two looks at a service, by design, and the driver waits for its second look."""

import os
import time

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": False,
    "library": "core",
    "guilty": "Poller actor, asleep by design",
    "function": "poll",
    "note": "time.sleep(300) between two polls; other actors go on working",
}


@ray.remote
class Poller:
    def poll(self, looks):
        seen = []
        for i in range(looks):
            seen.append(os.getloadavg()[0])
            if i + 1 < looks:
                mark()
                time.sleep(300)
        return seen


@ray.remote
class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    counter = Counter.remote()
    looks = Poller.remote().poll.remote(2)
    while not ray.wait([looks], timeout=5)[0]:
        print("count", ray.get(counter.add.remote()), flush=True)
    print(ray.get(looks))
