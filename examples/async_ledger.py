# SPDX-License-Identifier: Apache-2.0
"""Generate ahead of training, with a bound on staleness, and resume: `python examples/async_ledger.py`."""

import random
import tempfile
from collections import deque
from pathlib import Path

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_rollouts import Claim, IndexStream, Ledger, LedgerConfig, Ref
from fairlead_workergroup import RayWorkerGroup

CONFIG = LedgerConfig(group_size=4, groups_per_version=8, max_staleness=1)
PROMPTS = IndexStream(1000, seed=0)


class Generator:
    def generate(self, prompt: int, samples: int) -> list[float]:
        return [random.random() for _ in range(samples)]  # your engine


class Trainer:
    def train(self, rewards: list[float]) -> float:
        return sum(rewards) / len(rewards)  # your optimizer step


def run(ledger: Ledger, generators: RayWorkerGroup, trainer: RayWorkerGroup, steps: range, folder: Path) -> None:
    """Train these steps, and write a checkpoint after each."""
    waiting = deque()
    for step in steps:
        while not isinstance(claim := ledger.claim(step, count=8), Claim):
            room = ledger.room()  # generate as far ahead as the bound allows
            for lease in ledger.lease(room) if room else ():
                worker = generators.at(worker=lease.prompt_id % generators.world_size)
                waiting.append((lease, worker.call("generate", lease.prompt, len(lease.samples), collect=())))
            lease, call = waiting.popleft()
            rewards = call.result(timeout=60)
            ledger.finish_many(
                [(lease, sample, Ref(value)) for sample, value in zip(lease.samples, rewards, strict=True)]
            )
        rewards = [sample.ref.value for group in claim.groups for sample in group.samples]
        loss = trainer.call("train", rewards, collect=(), timeout=60).result()
        ledger.advance(step, trained=step)
        ledger.prepare(step, folder)  # beside the weights that your trainer saves here
        ledger.commit(step)
        print(f"step {step}: {loss:.2f}, trained {[group.prompt_id for group in claim.groups]}")


init_ray(num_cpus=3)
with tempfile.TemporaryDirectory() as name, RayVirtualCluster([3], use_gpus=False) as cluster:
    slots, folder = cluster.slots(), Path(name)
    with RayWorkerGroup(slots[:2], Generator) as generators, RayWorkerGroup(slots[2:], Trainer) as trainer:
        run(Ledger(CONFIG, PROMPTS), generators, trainer, range(1, 4), folder)
        # A driver that starts again continues after the last checkpoint: no prompt is lost or trained twice.
        resumed = Ledger.restore(CONFIG, PROMPTS, step=3, version=3, directory=folder)
        run(resumed, generators, trainer, range(4, 6), folder)
