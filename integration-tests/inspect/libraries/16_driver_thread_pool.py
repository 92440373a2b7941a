# SPDX-License-Identifier: Apache-2.0
"""The driver gets results in a thread pool; one solver never converges because its residual becomes NaN."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "Solver actor that solves case 7",
    "function": "solve",
    "note": "endless loop at 100 % CPU, under the threads of the driver's pool, each of which stands in ray.get",
}


@ray.remote
class Solver:
    def solve(self, case):
        matrix = np.eye(20) * (case + 1)
        x, b = np.ones(20), np.arange(20.0)
        scale = 1.0 if case != 7 else np.inf
        residual = 1.0
        if case == 7:
            mark()
        while not residual < 1e-6:
            x = x + (b - matrix @ x) / (matrix.diagonal() * scale) * scale
            residual = np.abs(b - matrix @ x).max()
        return x.sum()


def run(solvers, case):
    return ray.get(solvers[case % len(solvers)].solve.remote(case))


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    solvers = [Solver.remote() for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run, solvers, case) for case in range(12)]
        for future in futures:
            print(future.result(), flush=True)
