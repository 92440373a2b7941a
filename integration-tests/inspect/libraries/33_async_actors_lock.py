# SPDX-License-Identifier: Apache-2.0
"""Two async actors hold their own asyncio.Lock while each awaits a method of the other one."""

import asyncio
import os

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (async actors)",
    "guilty": "the two Account actors, each waiting for the other",
    "function": "transfer",
    "note": "circular wait: transfer holds the lock of one and awaits deposit of the other, which awaits the lock",
}


@ray.remote
class Account:
    def __init__(self, balance):
        self.balance = balance
        self.lock = asyncio.Lock()

    async def pid(self):
        return os.getpid()

    async def deposit(self, amount):
        async with self.lock:
            self.balance += amount
            return self.balance

    async def transfer(self, other, amount, pids):
        async with self.lock:
            await asyncio.sleep(2)
            self.balance -= amount
            mark(pids=pids)
            return await other.deposit.remote(amount)


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    a, b = Account.remote(100), Account.remote(50)
    pids = ray.get([a.pid.remote(), b.pid.remote()])
    print(ray.get(a.deposit.remote(5)), flush=True)
    print(ray.get([a.transfer.remote(b, 10, pids), b.transfer.remote(a, 20, pids)]))
