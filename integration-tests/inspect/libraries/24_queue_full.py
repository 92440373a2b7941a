# SPDX-License-Identifier: Apache-2.0
"""A producer puts 60 items into a ray.util.queue of 5 places, but the consumer stops after 50."""

import ray
from hangs import mark, start_ray
from ray.util.queue import Queue

TRUTH = {
    "hangs": True,
    "library": "ray.util.queue",
    "guilty": "worker of the task produce",
    "function": "produce",
    "note": "Queue.put of a full queue: the worker waits for the queue's actor, whose coroutine waits for a place",
}


@ray.remote
def produce(queue, count):
    for i in range(count):
        if i == 55:
            mark()
        queue.put({"row": i})
    return count


@ray.remote
def consume(queue, count):
    total = 0
    for _ in range(count):
        total += queue.get()["row"]
    return total


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    queue = Queue(maxsize=5)
    results = [produce.remote(queue, 60), consume.remote(queue, 50)]
    print(ray.get(results))
