# SPDX-License-Identifier: Apache-2.0
"""Rank 0 iterates over a DataLoader whose forked child wants a lock that another thread held at the fork."""

import os
import threading
import time

import ray.train
import torch
from hangs import mark, start_ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

TRUTH = {
    "hangs": True,
    "library": "train",
    "guilty": "the DataLoader child of rank 0",
    "function": "__getitem__",
    "note": "a lock that was held during fork is never released in the child; rank 0 waits for the child, rank 1 for rank 0",
}


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if self.lock.locked():
            mark()
        with self.lock:
            return torch.full((8,), float(i))


def flush_metrics(lock):
    with lock:
        time.sleep(20)


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(8, 1))
    for epoch in range(5):
        images = Images()
        if rank == 0 and epoch == 1:
            threading.Thread(target=flush_metrics, args=(images.lock,)).start()
            time.sleep(1)
        loader = torch.utils.data.DataLoader(images, batch_size=16, num_workers=1, multiprocessing_context="fork")
        for batch in loader:
            model(batch).mean().backward()
        ray.train.report({"epoch": epoch})


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("results")),
    )
    print(trainer.fit().metrics)
