# SPDX-License-Identifier: Apache-2.0
"""Healthy: one trial trains LightGBM for several minutes while the other trials wait for their turn."""

import tempfile

import lightgbm
import numpy as np
from hangs import mark, start_ray
from ray import tune

TRUTH = {
    "hangs": False,
    "library": "lightgbm",
    "guilty": None,
    "function": "fit_model",
    "note": "one trial is busy in lightgbm.train and reports now and then; pending trials are normal",
}


def report_loss(env):
    if env.iteration % 100 == 99:
        tune.report({"loss": env.evaluation_result_list[0][2], "round": env.iteration + 1})


def fit_model(config):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40_000, 60))
    labels = features[:, :5].sum(axis=1) + rng.normal(size=40_000)
    data = lightgbm.Dataset(features, label=labels).construct()
    params = {"num_leaves": config["leaves"], "learning_rate": 0.01, "num_threads": 1, "verbosity": -1}
    first = lightgbm.train(params, data, num_boost_round=20)
    print("warm up:", first.num_trees())
    mark()
    lightgbm.train(params, data, num_boost_round=20_000, valid_sets=[data], callbacks=[report_loss])


if __name__ == "__main__":
    start_ray(num_cpus=2)
    tuner = tune.Tuner(
        tune.with_resources(fit_model, {"cpu": 2}),
        param_space={"leaves": tune.grid_search([127, 255, 511])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="lightgbm", storage_path=tempfile.mkdtemp()),
    )
    print(tuner.fit().get_best_result().config)
