# SPDX-License-Identifier: Apache-2.0
"""An asyncio driver gathers the answers of four async actors; one of them awaits an event that nobody sets."""

import asyncio

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (async actor)",
    "guilty": "Fetcher actor 2",
    "function": "fetch",
    "note": "await asyncio.Event.wait() in a coroutine; the event loop of the actor is idle",
}


@ray.remote
class Fetcher:
    def __init__(self, number):
        self.number = number
        self.ready = asyncio.Event()

    async def connect(self):
        await asyncio.sleep(0.1)
        if self.number != 2:
            self.ready.set()

    async def fetch(self, url):
        if not self.ready.is_set():
            mark()
        await self.ready.wait()
        return f"{url} by {self.number}"


async def main():
    fetchers = [Fetcher.remote(number) for number in range(4)]
    await asyncio.gather(*[fetcher.connect.remote() for fetcher in fetchers])
    pages = await asyncio.gather(*[fetcher.fetch.remote(f"page{i}") for i, fetcher in enumerate(fetchers)])
    print(pages)


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    asyncio.run(main())
