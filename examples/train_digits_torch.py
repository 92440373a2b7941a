# SPDX-License-Identifier: Apache-2.0
"""Train the classifier of train_digits.py with torch on a dp x tp group of workers, from one controller.

Batches are sharded over `dp`, and the hidden layer is split over `tp`. torch.distributed averages gradients over `dp`
and sums activations over `tp`, in process groups that are named after the axes.

    python examples/train_digits_torch.py --dp 2 --tp 2 --epochs 30
"""

import sys
import time

import numpy as np
from rich.progress import track
from train_digits import BATCH, CLASSES, PIXELS, digits, read_options, run, shards

from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Shard, current_worker


class DigitsWorker:
    """A worker that trains one shard of the model on one shard of the data."""

    def __init__(self, hidden: int, lr: float) -> None:
        import torch

        # Several processes share the cores of the machine.
        torch.set_num_threads(1)
        self.hidden, self.lr = hidden, lr

    def connect(self) -> None:
        """Join the process group and the group of each axis, and build this worker's part of the model."""
        import torch

        from fairlead_workergroup.torch import axis_group, init_process_group

        init_process_group()
        worker = current_worker()
        self.axis = {axis: axis_group(axis) for axis in worker.sharding.names}
        tp, tp_rank = worker.sharding.get_axis_size("tp"), worker.coords["tp"]
        mine = slice(tp_rank * self.hidden // tp, (tp_rank + 1) * self.hidden // tp)
        torch.manual_seed(0)  # Every worker creates the same full matrices, and keeps its part of them.
        inner, outer = torch.nn.Linear(PIXELS, self.hidden), torch.nn.Linear(self.hidden, CLASSES)
        self.weights = [inner.weight[mine], inner.bias[mine], outer.weight[:, mine], outer.bias]
        self.weights = [weight.detach().clone().requires_grad_() for weight in self.weights]
        self.optimizer = torch.optim.Adam(self.weights, lr=self.lr)

    def _logits(self, x):
        """Return the logits: split by columns, then by rows, the two layers need one sum over `tp`."""
        import torch
        import torch.distributed as dist

        class SumOverTp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, partial, group):
                whole = partial.clone()
                dist.all_reduce(whole, group=group)
                return whole

            @staticmethod
            def backward(ctx, grad):
                return grad, None  # Every worker has the same loss, so the gradient of the sum is already complete.

        inner, inner_bias, outer, outer_bias = self.weights
        partial = torch.relu(x @ inner.T + inner_bias) @ outer.T
        return SumOverTp.apply(partial, self.axis["tp"]) + outer_bias

    def step(self, batch: tuple[np.ndarray, np.ndarray]) -> float:
        """Take one step on this shard of the batch, and return the loss on it."""
        import torch
        import torch.distributed as dist

        x, y = map(torch.tensor, batch)
        loss = torch.nn.functional.cross_entropy(self._logits(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        for weight in self.weights:
            dist.all_reduce(weight.grad, group=self.axis["dp"])
            weight.grad /= dist.get_world_size(self.axis["dp"])
        self.optimizer.step()
        return loss.item()

    def correct(self, batch: tuple[np.ndarray, np.ndarray]) -> int:
        """Return the number of digits in this shard that the model classifies correctly."""
        import torch

        with torch.no_grad():
            x, y = map(torch.tensor, batch)
            return int((self._logits(x).argmax(dim=1) == y).sum())

    def disconnect(self) -> None:
        from fairlead_workergroup.torch import destroy

        destroy()


def train(group: RayWorkerGroup, *, dp: int, epochs: int) -> float:
    """Train, and return the accuracy on the test set."""
    (x, y), (test_x, test_y) = digits()
    rng = np.random.default_rng(1)
    losses: list[float] = []
    for _ in track(range(epochs), description="Training", disable=not sys.stdout.isatty()):
        order = rng.permutation(len(x))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            batches = Shard(shards(x[chosen], y[chosen], dp), "dp")
            losses = group.call("step", batches, collect="dp").result()
    print("last loss per dp coordinate:", ", ".join(f"{loss:.3f}" for loss in losses))
    call = group.call("correct", Shard(shards(test_x, test_y, dp), "dp"), collect="dp")
    return sum(call.result()) / len(test_x)


def main(argv: list[str] | None = None) -> int:
    options = read_options(argv, __doc__)
    began = time.monotonic()
    builder = RayWorkerBuilder(DigitsWorker, hidden=options.hidden, lr=3e-3)

    def work(group: RayWorkerGroup) -> float:
        group.call("connect").result()
        accuracy = train(group, dp=options.dp, epochs=options.epochs)
        group.shutdown(cleanup_method="disconnect")
        return accuracy

    return run(builder, work, options, began)


if __name__ == "__main__":
    sys.exit(main())
