# SPDX-License-Identifier: Apache-2.0
"""Each trial waits for a task that must run in its placement group, whose second CPU the trial's own helper actor holds."""

import tempfile

import numpy as np
import ray
from hangs import mark, start_ray
from ray import tune

TRUTH = {
    "hangs": True,
    "library": "tune",
    "guilty": "pending task featurize",
    "function": "objective",
    "note": "the nested task can never be placed: both bundles of the trial are held, by the trial and by its Replay actor",
}


@ray.remote(num_cpus=1)
class Replay:
    def __init__(self):
        self.rows = []

    def add(self, row):
        self.rows.append(row)
        return len(self.rows)


@ray.remote
def featurize(seed, columns):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(1000, columns))


def objective(config):
    replay = Replay.remote()
    weights = np.ones(config["columns"])
    for epoch in range(10):
        ray.get(replay.add.remote({"epoch": epoch}))
        block = featurize.remote(epoch, config["columns"])
        mark(pending="featurize")
        features = ray.get(block)
        tune.report({"score": float((features @ weights).std() * config["lr"])})


if __name__ == "__main__":
    start_ray(num_cpus=5)
    resources = tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}])
    tuner = tune.Tuner(
        tune.with_resources(objective, resources),
        param_space={"lr": tune.loguniform(1e-3, 1e-1), "columns": tune.choice([8, 16])},
        tune_config=tune.TuneConfig(metric="score", mode="min", num_samples=2),
        run_config=tune.RunConfig(name="nested", storage_path=tempfile.mkdtemp()),
    )
    print(tuner.fit().get_best_result().metrics)
