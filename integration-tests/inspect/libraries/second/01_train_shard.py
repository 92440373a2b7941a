# SPDX-License-Identifier: Apache-2.0
"""Train worker 1 polls for ever for a shard file that was never written; worker 0 waits for it in the all-reduce of DDP."""

import os
import tempfile
import time

import numpy as np
import ray.train
import torch
from hangs import mark, start_ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

TRUTH = {
    "hangs": True,
    "library": "train",
    "guilty": "Train worker of rank 1",
    "function": "load_shard",
    "note": "polls for a missing file; rank 0 is only a victim, in the all-reduce of backward",
}


def load_shard(folder, index):
    path = os.path.join(folder, f"shard-{index:05d}.npy")
    if not os.path.exists(path):
        mark()
        while not os.path.exists(path):
            time.sleep(2.0)
    return torch.from_numpy(np.load(path))


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    size = ray.train.get_context().get_world_size()
    model = prepare_model(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(rank, config["shards"], size):
        data = load_shard(config["folder"], index)
        for batch in data.split(64):
            loss = (model(batch[:, :16]) - batch[:, 16:]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item(), "shard": index})


if __name__ == "__main__":
    start_ray(num_cpus=4)
    folder = tempfile.mkdtemp()
    rows = np.random.rand(5 * 256, 17).astype("float32")
    for number in range(5):
        np.save(os.path.join(folder, f"shard-{number:05d}.npy"), rows[number * 256 : (number + 1) * 256])
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"folder": folder, "shards": 6},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="shards", storage_path=tempfile.mkdtemp()),
    )
    print(trainer.fit().metrics)
