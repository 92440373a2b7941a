# SPDX-License-Identifier: Apache-2.0
"""A DataLoader worker was forked while a thread of the trainer actor held a lock, so the child waits for it for ever."""

import threading
import time

import ray
import torch
from hangs import mark, start_ray
from torch.utils.data import DataLoader, Dataset

TRUTH = {
    "hangs": True,
    "library": "torch DataLoader",
    "guilty": "DataLoader worker process, child of the actor Trainer",
    "function": "__getitem__",
    "note": "fork with a held threading.Lock; the actor only waits in the queue of the DataLoader",
}


class Samples(Dataset):
    def __init__(self, size):
        self.size = size
        self.index = {}
        self.lock = threading.Lock()
        threading.Thread(target=self.refresh, daemon=True).start()

    def refresh(self):
        while True:
            with self.lock:
                for number in range(self.size):
                    self.index[number] = number % 17
                    time.sleep(0.01)
            time.sleep(30.0)

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        if self.lock.locked():
            mark()
        with self.lock:
            label = self.index[number]
        return torch.full((32,), float(number)), label


@ray.remote
class Trainer:
    def __init__(self, size):
        self.samples = Samples(size)
        self.model = torch.nn.Linear(32, 17)

    def epoch(self):
        time.sleep(1.0)
        total = 0.0
        loader = DataLoader(self.samples, batch_size=32, num_workers=1, multiprocessing_context="fork")
        for features, labels in loader:
            total += torch.nn.functional.cross_entropy(self.model(features), labels).item()
        return total


if __name__ == "__main__":
    start_ray(num_cpus=2)
    trainer = Trainer.remote(1000)
    for epoch in range(3):
        print(epoch, ray.get(trainer.epoch.remote()))
