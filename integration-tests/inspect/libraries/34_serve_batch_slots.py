# SPDX-License-Identifier: Apache-2.0
"""Serve batching: the background coroutine that frees slots died of an exception, and the batch handler awaits a slot."""

import asyncio

from hangs import mark, start_ray
from ray import serve

TRUTH = {
    "hangs": True,
    "library": "serve",
    "guilty": "replica of Model",
    "function": "predict",
    "note": "await asyncio.Queue.get() inside a @serve.batch handler; nobody fills the queue any more",
}


@serve.deployment(max_ongoing_requests=50)
class Model:
    def __init__(self):
        self.slots = None

    async def refill(self):
        for size in (4, 4, 4, 0):
            await self.slots.put(100 // size)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.2)
    async def predict(self, numbers):
        if self.slots is None:
            self.slots = asyncio.Queue()
            self.task = asyncio.create_task(self.refill())
            await asyncio.sleep(0.5)
        if self.slots.empty():
            mark()
        slot = await self.slots.get()
        return [number * slot for number in numbers]

    async def __call__(self, number):
        return await self.predict(number)


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    serve.start(proxy_location="Disabled")
    app = serve.run(Model.bind(), route_prefix=None)
    for wave in range(8):
        answers = [app.remote(number) for number in range(8)]
        print(wave, [answer.result() for answer in answers], flush=True)
