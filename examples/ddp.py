# SPDX-License-Identifier: Apache-2.0
"""Train with DDP on two workers, lose one, and continue from the last checkpoint: `python examples/ddp.py`."""

import tempfile
from pathlib import Path

import torch

from fairlead_workergroup import Restart, Shard, WorkerFailureError, launch
from fairlead_workergroup.testing import kill
from fairlead_workergroup.torch import init_process_group, wrap_ddp


class Trainer:
    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "checkpoint.pt"
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def start(self) -> int:
        """Join the other workers, load the checkpoint if there is one, and return its step."""
        init_process_group()
        self.ddp = wrap_ddp(self.model)
        if not self.file.exists():
            return 0
        step, model, optimizer = torch.load(self.file)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return step

    def train(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        x, y = batch
        self.optimizer.zero_grad()
        loss = (self.ddp(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, step: int) -> None:
        new = self.file.with_suffix(".new")
        torch.save((step, self.model.state_dict(), self.optimizer.state_dict()), new)
        new.rename(self.file)  # so that the checkpoint is complete, or the one before


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))  # the same if the step is repeated
    return list(zip(x.chunk(2), x.sum(1, keepdim=True).chunk(2), strict=True))


restart = Restart(on_failure=True, scope="group")  # all workers restart, because they share collectives
with tempfile.TemporaryDirectory() as folder, launch(Trainer, dp=2, init_args=[folder], restart=restart) as group:
    step = group.call("start", collect=(), timeout=120).result()
    while step < 40:
        try:
            losses = group.call("train", Shard(batches(step), "dp"), timeout=60).result()
            step += 1
            if step % 10 == 0:
                group.at(dp=0).call("save", step, timeout=60).result()
                print(f"step {step}: loss {sum(losses) / 2:.3f}")
            if step == 25 and group.state().restarts == 0:  # leave this out of your program
                kill(group, 1)
        except WorkerFailureError as error:
            print(error)
            step = group.call("start", collect=(), timeout=120).result()
