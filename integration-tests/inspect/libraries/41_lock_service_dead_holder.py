# SPDX-License-Identifier: Apache-2.0
"""A lock actor for the cluster: the worker that held the lock was killed, and the others wait for it for ever."""

import asyncio
import time

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (async actor)",
    "guilty": "LockService actor (the holder is dead)",
    "function": "acquire",
    "note": "await asyncio.Condition.wait_for in the lock actor; three Writer actors wait for its answer",
}


@ray.remote
class LockService:
    def __init__(self):
        self.condition = asyncio.Condition()
        self.owner = None

    async def acquire(self, owner):
        async with self.condition:
            if self.owner == 0 and owner == 3:
                mark()
            await self.condition.wait_for(lambda: self.owner is None)
            self.owner = owner

    async def release(self):
        async with self.condition:
            self.owner = None
            self.condition.notify_all()


@ray.remote
class Writer:
    def __init__(self, number, lock):
        self.number, self.lock = number, lock

    def write(self, seconds):
        ray.get(self.lock.acquire.remote(self.number))
        time.sleep(seconds)
        ray.get(self.lock.release.remote())
        return self.number


if __name__ == "__main__":
    start_ray(num_cpus=6, object_store_memory=400_000_000)
    lock = LockService.options(name="lock").remote()
    writers = [Writer.remote(number, lock) for number in range(4)]
    print(ray.get([writer.write.remote(0.1) for writer in writers]), flush=True)
    first = writers[0].write.remote(5)
    time.sleep(2)
    ray.kill(writers[0])
    print(ray.get([writer.write.remote(0.1) for writer in writers[1:]]))
