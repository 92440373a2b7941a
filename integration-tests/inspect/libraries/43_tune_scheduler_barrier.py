# SPDX-License-Identifier: Apache-2.0
"""Tune: two trials meet at a file barrier, but only one of them fits into the cluster at a time."""

import os
import time

from hangs import mark, start_ray
from ray import tune

TRUTH = {
    "hangs": True,
    "library": "tune",
    "guilty": "the running trial, which waits for a trial that is not started",
    "function": "wait_for_all",
    "note": "polls a directory for the other trial's file; the second trial is pending for want of CPUs",
}


def wait_for_all(folder, name, count):
    open(os.path.join(folder, name), "w").close()
    mark()
    while len(os.listdir(folder)) < count:
        time.sleep(0.2)


def objective(config):
    loss = 5.0
    wait_for_all(config["folder"], f"seed{config['seed']}", 2)
    for i in range(5):
        loss *= 0.5
        tune.report({"loss": loss + config["seed"]})


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    folder = os.path.abspath("ready")
    os.makedirs(folder)
    tuner = tune.Tuner(
        tune.with_resources(objective, {"cpu": 2}),
        param_space={"seed": tune.grid_search([0, 1]), "folder": folder},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=os.path.abspath("results")),
    )
    print(tuner.fit().get_best_result().config)
