# SPDX-License-Identifier: Apache-2.0
"""Two consumers share one Queue but the producer puts only one sentinel, so the second consumer waits for ever."""

import time

import ray
from hangs import mark, start_ray
from ray.util.queue import Queue

TRUTH = {
    "hangs": True,
    "library": "util.queue",
    "guilty": "consume task that is left",
    "function": "consume",
    "note": "get() from an empty queue that nobody fills any more; the queue actor is idle",
}


@ray.remote
def produce(queue, count):
    for number in range(count):
        queue.put({"id": number, "seconds": 4.0 if number == count - 1 else 0.1})
    queue.put(None)
    return count


@ray.remote
def consume(queue):
    done = 0
    while True:
        if queue.empty():
            mark()
        job = queue.get()
        if job is None:
            return done
        time.sleep(job["seconds"])
        done += 1


if __name__ == "__main__":
    start_ray(num_cpus=4)
    queue = Queue(maxsize=100)
    print("jobs:", ray.get(produce.remote(queue, 30)))
    consumers = [consume.remote(queue) for _ in range(2)]
    print("done:", sum(ray.get(consumers)))
    queue.shutdown()
