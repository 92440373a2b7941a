# SPDX-License-Identifier: Apache-2.0
"""DDP: rank 1 skips a batch without labels, goes on to report, and rank 0 waits in the all-reduce of backward."""

import os

import ray.train
import torch
from hangs import mark, start_ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

TRUTH = {
    "hangs": True,
    "library": "train",
    "guilty": "train worker of rank 1",
    "function": "train_loop",
    "note": "rank 1 skipped one step and stands in ray.train.report; rank 0 stands in a gloo collective of loss.backward or optimizer step",
}


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(10):
        loss = torch.zeros(())
        for batch in range(5):
            labels = torch.randn(16, 1)
            if epoch == 2 and rank == 1 and batch == 4:
                labels = labels[:0]
            if len(labels) == 0:
                continue
            loss = ((model(torch.randn(16, 8)) - labels) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch == 2 and rank == 1:
            mark()
        ray.train.report({"loss": float(loss.detach()), "epoch": epoch})


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("results")),
    )
    print(trainer.fit().metrics)
