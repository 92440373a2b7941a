# SPDX-License-Identifier: Apache-2.0
"""Modin on Ray: DataFrame.apply calls a function that never ends for a negative number."""

import os

os.environ["MODIN_ENGINE"] = "ray"
os.environ["MODIN_CPUS"] = "3"

import modin.pandas as pd
import numpy as np
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "modin",
    "guilty": "worker of the modin task that has row 4000",
    "function": "collatz",
    "note": "endless loop in pure Python; the driver waits for a partition",
}


def collatz(row):
    number, steps = int(row["number"]), 0
    if number < 0:
        mark()
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    numbers = np.arange(1, 6001)
    numbers[4000] = -5
    frame = pd.DataFrame({"number": numbers, "weight": numbers * 0.5})
    print(frame.apply(collatz, axis=1).sum())
