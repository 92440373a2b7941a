# SPDX-License-Identifier: Apache-2.0
"""Serve: Cart asks Prices, which asks Cart again, and Cart takes only one request at a time."""

import os

from hangs import mark, start_ray
from ray import serve

TRUTH = {
    "hangs": True,
    "library": "serve",
    "guilty": "replicas of Cart and Prices, each waiting for the other",
    "function": "price",
    "note": "circular wait: Cart.total awaits Prices.price, which awaits Cart.discount, which is never scheduled",
}


@serve.deployment(max_ongoing_requests=5)
class Prices:
    async def price(self, item, customer, pid):
        cart = serve.get_deployment_handle("Cart", "default")
        if customer == "vip":
            mark(pids=[pid])
            return 10 * await cart.discount.remote(customer)
        return 10.0


@serve.deployment(max_ongoing_requests=1)
class Cart:
    def __init__(self, prices):
        self.prices = prices

    async def discount(self, customer):
        return 0.9

    async def total(self, items, customer):
        return sum([await self.prices.price.remote(item, customer, os.getpid()) for item in items])


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    serve.start(proxy_location="Disabled")
    app = serve.run(Cart.bind(Prices.bind()), name="default", route_prefix=None)
    print(app.total.remote(["tea", "milk"], "guest").result())
    print(app.total.remote(["tea", "milk"], "vip").result())
