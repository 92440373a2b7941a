# SPDX-License-Identifier: Apache-2.0
"""XGBoost with two ranks: rank 1 opens a named pipe for its features, and nobody ever writes into it."""

import os

import numpy as np
import ray.train
import xgboost
from hangs import mark, start_ray
from ray.train import RunConfig, ScalingConfig
from ray.train.xgboost import XGBoostTrainer

TRUTH = {
    "hangs": True,
    "library": "train+xgboost",
    "guilty": "train worker of rank 1",
    "function": "load_shard",
    "note": "open() of a FIFO without a writer; rank 0 waits in xgboost's collective",
}


def load_shard(rank, folder):
    rng = np.random.default_rng(rank)
    if rank == 1:
        path = os.path.join(folder, "features-1")
        mark()
        with open(path, "rb") as file:
            return np.frombuffer(file.read()).reshape(-1, 5)
    return rng.random((500, 5))


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    x = load_shard(rank, config["folder"])
    data = xgboost.DMatrix(x, label=x.sum(axis=1))
    booster = xgboost.train({"objective": "reg:squarederror", "nthread": 1}, data, num_boost_round=20)
    ray.train.report({"rounds": booster.num_boosted_rounds()})


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    folder = os.path.abspath("features")
    os.makedirs(folder)
    os.mkfifo(os.path.join(folder, "features-1"))
    trainer = XGBoostTrainer(
        train_loop,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("results")),
    )
    print(trainer.fit().metrics)
