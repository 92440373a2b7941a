# SPDX-License-Identifier: Apache-2.0
"""Healthy: a Serve deployment makes a yearly report month by month, which takes some minutes."""

import time

import numpy as np
from hangs import mark, start_ray
from ray import serve

TRUTH = {
    "hangs": False,
    "library": "serve",
    "guilty": "replica of Reports, slow",
    "function": "month",
    "note": "12 months of about 20 s each, in a thread of the replica; quick requests are served in between",
}


@serve.deployment(max_ongoing_requests=1)
class Reports:
    def month(self, number):
        x = np.random.default_rng(number).random((100, 100))
        for _ in range(50):
            x = np.tanh(x @ x.T / 100)
            time.sleep(0.4)
        return float(x.mean())

    def year(self):
        results = []
        for number in range(12):
            if number == 1:
                mark(function="month")
            results.append(self.month(number))
        return results


@serve.deployment
class Front:
    def __init__(self, reports):
        self.reports = reports

    async def hello(self):
        return "hello"

    async def year(self):
        return sum(await self.reports.year.remote())


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    serve.start(proxy_location="Disabled")
    app = serve.run(Front.bind(Reports.bind()), route_prefix=None)
    print(app.hello.remote().result(), flush=True)
    print(app.year.remote().result())
