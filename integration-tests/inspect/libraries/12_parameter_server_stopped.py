# SPDX-License-Identifier: Apache-2.0
"""Parameter server with three workers: the process of the server is stopped by a SIGSTOP from outside."""

import os
import signal
import threading
import time

import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "ParameterServer actor",
    "function": "apply_gradients",
    "note": "stopped (state T) by a memory watchdog in the driver; the workers wait for its reply",
}


@ray.remote
class ParameterServer:
    def __init__(self):
        self.weights = np.zeros(1000)

    def pid(self):
        return os.getpid()

    def apply_gradients(self, gradient):
        deadline = time.monotonic() + 0.02
        while time.monotonic() < deadline:
            self.weights = self.weights - 0.001 * gradient
        return self.weights


@ray.remote
def worker(server, rank, rounds):
    weights = np.zeros(1000)
    for i in range(rounds):
        gradient = np.random.default_rng(i * 10 + rank).random(1000) + weights * 0.001
        weights = ray.get(server.apply_gradients.remote(gradient))
    return float(weights.mean())


def watchdog(pid):
    time.sleep(10)
    mark(pid=pid, function="apply_gradients")
    os.kill(pid, signal.SIGSTOP)


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    server = ParameterServer.remote()
    threading.Thread(target=watchdog, args=(ray.get(server.pid.remote()),), daemon=True).start()
    print(ray.get([worker.remote(server, rank, 100_000) for rank in range(3)]))
