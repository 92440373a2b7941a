# SPDX-License-Identifier: Apache-2.0
"""Train with DDP on two workers, lose one, and continue from the last checkpoint: `python examples/ddp.py`."""

import tempfile
from pathlib import Path

import torch

from fairlead_workergroup import Restart, Shard, WorkerFailureError, current_worker, launch
from fairlead_workergroup.testing import kill
from fairlead_workergroup.torch import init_process_group, wrap_ddp


class Trainer:
    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "checkpoint.pt"
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def start(self) -> int:
        """Join the others, load the checkpoint if there is one, and return its step."""
        init_process_group()
        saved = torch.load(self.file) if self.file.exists() else {"step": 0}
        if saved["step"]:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.ddp = wrap_ddp(self.model)
        return saved["step"]

    def train(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        x, y = batch
        self.optimizer.zero_grad()
        loss = (self.ddp(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, step: int) -> None:
        if current_worker().rank == 0:
            state = {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.file.with_suffix(".new"))
            self.file.with_suffix(".new").rename(self.file)  # complete, or not there


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batch of each worker. It depends on the step only, so a step can be repeated."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return list(zip(x.split(32), x.sum(1, keepdim=True).split(32), strict=True))


if __name__ == "__main__":
    restart = Restart(on_failure=True, scope="group")  # collectives: all restart if one is lost
    with tempfile.TemporaryDirectory() as folder, launch(Trainer, dp=2, init_args=[folder], restart=restart) as group:
        step, killed = max(group.call("start", timeout=120).result()), False
        while step < 40:
            try:
                losses = group.call("train", Shard(batches(step), "dp"), timeout=60).result()
                step += 1
                if step % 10 == 0:
                    group.call("save", step, timeout=60).result()
                    print(f"step {step}: loss {sum(losses) / 2:.3f}")
                if step == 25 and not killed:  # leave this out in your program
                    killed = True
                    kill(group, 1)
            except WorkerFailureError as error:
                print(f"lost rank {error.failures[0].rank}: {error.failures[0].kind}")
                step = max(group.call("start", timeout=120).result())  # on restarted workers
