# SPDX-License-Identifier: Apache-2.0
"""Rank 1 of an XGBoost training stops early on its own metric and waits in report(); rank 0 waits for it in the all-reduce of the next round."""

import os
import tempfile

import numpy as np
import ray.train
import ray.train.collective
import xgboost as xgb
from hangs import mark, start_ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.xgboost import XGBoostTrainer

TRUTH = {
    "hangs": True,
    "library": "xgboost",
    "guilty": "Train workers of rank 0 and rank 1 (deadlock)",
    "function": "train_loop",
    "note": "rank 1 left the boosting loop and stands in train.report, rank 0 stands in xgb.train",
}


class StopOnLocalError(xgb.callback.TrainingCallback):
    def __init__(self, features, labels):
        self.features, self.labels, self.best, self.bad = features, labels, float("inf"), 0

    def after_iteration(self, model, epoch, evals_log):
        error = float(np.mean((model.inplace_predict(self.features) - self.labels) ** 2))
        self.bad = 0 if error < self.best else self.bad + 1
        self.best = min(self.best, error)
        return self.bad >= 3


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    leader = ray.train.collective.broadcast_from_rank_zero(os.getpid())
    rng = np.random.default_rng(rank)
    features = rng.normal(size=(4000, 10)).astype("float32")
    labels = features[:, 0] * 3 + features[:, 1]
    if rank == 1:
        labels[3000:] = rng.normal(size=1000)
    matrix = xgb.DMatrix(features[:3000], label=labels[:3000])
    stop = StopOnLocalError(features[3000:], labels[3000:])
    booster = xgb.train({"eta": 0.01, "nthread": 1}, matrix, num_boost_round=config["rounds"], callbacks=[stop])
    folder = tempfile.mkdtemp()
    booster.save_model(os.path.join(folder, "model.json"))
    mark(pids=[leader, os.getpid()])
    ray.train.report({"error": stop.best}, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    start_ray(num_cpus=4)
    trainer = XGBoostTrainer(
        train_loop,
        train_loop_config={"rounds": 400},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="boost", storage_path=tempfile.mkdtemp()),
    )
    print(trainer.fit().metrics)
