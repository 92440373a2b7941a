# SPDX-License-Identifier: Apache-2.0
"""Healthy: DDP in which rank 1 computes its features for some minutes, while rank 0 waits in the all-reduce."""

import os
import time

import numpy as np
import ray.train
import torch
from hangs import mark, start_ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

TRUTH = {
    "hangs": False,
    "library": "train",
    "guilty": "train worker of rank 1, a straggler",
    "function": "features",
    "note": "rank 1 works for about 200 s in small numpy steps; rank 0 stands in a gloo collective of backward",
}


def features(rank, epoch):
    x = np.random.default_rng(rank).random((64, 64))
    rows = 5 if rank == 0 or epoch == 0 else 500
    for i in range(rows):
        x = np.tanh(x @ x.T / 64)
        time.sleep(0.4)
        if i == 10:
            mark()
    return torch.tensor(x[:, :8], dtype=torch.float32)


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(8, 1))
    for epoch in range(2):
        x = features(rank, epoch)
        model(x).pow(2).mean().backward()
        ray.train.report({"epoch": epoch})


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("results")),
    )
    print(trainer.fit().metrics)
