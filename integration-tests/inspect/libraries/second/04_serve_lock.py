# SPDX-License-Identifier: Apache-2.0
"""A Serve replica awaits an asyncio lock that an earlier failed request never released."""

import asyncio

from hangs import mark, start_ray
from ray import serve

TRUTH = {
    "hangs": True,
    "library": "serve",
    "guilty": "replica of the deployment FeatureCache",
    "function": "lookup",
    "note": "asyncio.Lock leaked by an exception; the event loop is idle; the Frontend replica only waits for it",
}


@serve.deployment(max_ongoing_requests=16)
class FeatureCache:
    def __init__(self):
        self.lock = asyncio.Lock()
        self.table = {}

    async def load(self, user):
        await asyncio.sleep(0.05)
        if user % 10 == 7:
            raise KeyError(f"no features for user {user}")
        return [user * 0.1, user * 0.2]

    async def lookup(self, user):
        if self.lock.locked():
            mark()
        await self.lock.acquire()
        if user not in self.table:
            self.table[user] = await self.load(user)
        self.lock.release()
        return self.table[user]


@serve.deployment
class Frontend:
    def __init__(self, cache):
        self.cache = cache

    async def __call__(self, user):
        features = await self.cache.lookup.remote(user)
        return sum(features)


if __name__ == "__main__":
    start_ray(num_cpus=4)
    serve.start(proxy_location="Disabled")
    handle = serve.run(Frontend.bind(FeatureCache.bind()), name="scores", route_prefix=None)
    for user in range(20):
        try:
            print(user, handle.remote(user).result())
        except Exception as error:
            print(user, "skipped:", type(error).__name__)
