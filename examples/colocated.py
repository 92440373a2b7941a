# SPDX-License-Identifier: Apache-2.0
"""Train and generate in turns on the same slots, with weights over a link: `python examples/colocated.py`."""

import torch

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_transfer import Link
from fairlead_workergroup import RayWorkerGroup, Shard
from fairlead_workergroup.torch import init_process_group, wrap_ddp


class Policy:
    """Prefers the token 3, once it has been rewarded for it."""

    def __init__(self) -> None:
        self.logits = torch.nn.Embedding(1, 8)
        torch.nn.init.zeros_(self.logits.weight)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"logits": self.logits.weight.detach()}


class Trainer(Policy):
    def connect(self) -> None:
        init_process_group()
        self.ddp = wrap_ddp(self.logits)
        self.optimizer = torch.optim.SGD(self.logits.parameters(), lr=2.0)

    def train(self, tokens: torch.Tensor) -> float:
        rewards = (tokens == 3).float()
        log_probs = torch.log_softmax(self.ddp(torch.zeros_like(tokens)), -1).gather(1, tokens[:, None])[:, 0]
        self.optimizer.zero_grad()
        (-(rewards - rewards.mean()) * log_probs).mean().backward()
        self.optimizer.step()
        return rewards.mean().item()


class Generator(Policy):
    def generate(self, count: int) -> torch.Tensor:
        return torch.multinomial(torch.softmax(self.logits.weight[0], 0), count, replacement=True)


init_ray(num_cpus=4)  # a CPU for each of two groups in two slots; on GPUs leave use_gpus=False out
axes = NamedSharding.from_shape(dp=2)
with (
    RayVirtualCluster([2], use_gpus=False, enable_colocation=True) as cluster,
    RayWorkerGroup(cluster, Trainer, name_prefix="trainer", sharding_annotations=axes) as trainer,
    RayWorkerGroup(cluster, Generator, name_prefix="generator", sharding_annotations=axes) as generator,
    Link(trainer, generator, source="weights", target="weights") as link,
):
    trainer.call("connect", timeout=120).result()
    for step in range(1, 21):
        samples = generator.call("generate", 256, collect="dp")
        rewards = trainer.call("train", Shard(samples, "dp"), timeout=60).result()
        link.send(version=step, timeout=60)
        if step % 5 == 0:
            print(f"step {step}: reward {sum(rewards) / 2:.2f}")
