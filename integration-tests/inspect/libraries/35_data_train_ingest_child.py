# SPDX-License-Identifier: Apache-2.0
"""Data feeds two train workers; a UDF tokenizes in a child process that is killed, and waits for its answer in a queue."""

import multiprocessing
import os

import ray
import ray.train
from hangs import mark, start_ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

TRUTH = {
    "hangs": True,
    "library": "data+train",
    "guilty": "task worker of map_batches(tokenize)",
    "function": "tokenize",
    "note": "multiprocessing.Queue.get for the answer of a killed child; both train workers wait for the next batch",
}


def tokenize_all(numbers, answers):
    if 1111 in numbers:
        os.kill(os.getpid(), 9)
    answers.put([number % 97 for number in numbers])


def tokenize(batch):
    fork = multiprocessing.get_context("fork")
    numbers = [int(number) for number in batch["id"]]
    answers = fork.Queue()
    child = fork.Process(target=tokenize_all, args=(numbers, answers))
    child.start()
    if 1111 in numbers:
        mark()
    batch["token"] = answers.get()
    child.join()
    return batch


def train_loop(config):
    total = 0
    for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=50):
        total += int(batch["token"].sum())
    ray.train.report({"total": total})


if __name__ == "__main__":
    start_ray(num_cpus=6, object_store_memory=400_000_000)
    dataset = ray.data.range(2000, override_num_blocks=20).map_batches(tokenize, batch_size=100)
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2),
        datasets={"train": dataset},
        run_config=RunConfig(storage_path=os.path.abspath("results")),
    )
    print(trainer.fit().metrics)
