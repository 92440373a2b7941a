# SPDX-License-Identifier: Apache-2.0
"""Healthy: two quick trials and one with a big model, which fits for some minutes between two reports."""

import os
import time

import numpy as np
from hangs import mark, start_ray
from ray import tune

TRUTH = {
    "hangs": False,
    "library": "tune",
    "guilty": "the trial with width 64, slow",
    "function": "fit",
    "note": "numpy work in chunks, about 200 s per report",
}


def fit(width):
    weights = np.ones((width, width)) / width
    for i in range(width * 7):
        weights = np.tanh(weights @ weights + 0.1)
        time.sleep(0.002 * width if width < 64 else 0.45)
        if width == 64 and i == 10:
            mark()
    return float(weights.mean())


def objective(config):
    for _ in range(3):
        tune.report({"loss": fit(config["width"])})


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    tuner = tune.Tuner(
        objective,
        param_space={"width": tune.grid_search([4, 8, 64])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=os.path.abspath("results")),
    )
    print(tuner.fit().get_best_result().config)
