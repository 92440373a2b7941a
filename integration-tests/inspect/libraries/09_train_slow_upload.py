# SPDX-License-Identifier: Apache-2.0
"""Healthy: rank 0 uploads its checkpoint through a slow line, and rank 1 waits for it in report."""

import os
import time

import ray.train
import torch
from hangs import mark, start_ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

TRUTH = {
    "hangs": False,
    "library": "train",
    "guilty": "train worker of rank 0, slow",
    "function": "upload",
    "note": "writes 300 chunks with a rate limit, about 150 s",
}


def upload(state, path):
    data = repr(state).encode() * 300
    size = len(data) // 300
    with open(path, "wb") as file:
        for i in range(300):
            if i == 20:
                mark()
            file.write(data[i * size : (i + 1) * size])
            file.flush()
            time.sleep(0.5)


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(8, 1))
    for epoch in range(3):
        loss = model(torch.randn(16, 8)).pow(2).mean()
        loss.backward()
        if rank == 0:
            upload(model.state_dict(), f"/tmp/upload-{os.getpid()}.bin")
        ray.train.report({"loss": float(loss)})


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("results")),
    )
    print(trainer.fit().metrics)
