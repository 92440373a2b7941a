# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits on a dp x tp group of workers, from one controller.

Batches are sharded over `dp`, and the hidden layer is split over `tp`. torch.distributed averages gradients over `dp`
and sums activations over `tp`, in process groups that are named after the axes.

    python examples/train_digits.py --dp 2 --tp 2 --epochs 30
"""

import argparse
import sys
import time
from typing import NoReturn

import numpy as np
import ray
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

from fairlead_placement import PlacementError, RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Shard, current_worker

PIXELS, CLASSES = 64, 10


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


def digits(seed: int = 0) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (pixels, labels) of the training set and of the test set."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] / 16.0).astype(np.float32), y[order].astype(np.int64)
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def shards(x: np.ndarray, y: np.ndarray, dp: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(zip(np.array_split(x, dp), np.array_split(y, dp), strict=True))


def train(group: RayWorkerGroup, *, dp: int, epochs: int, batch_size: int = 96) -> float:
    """Train, and return the accuracy on the test set."""
    (x, y), (test_x, test_y) = digits()
    rng = np.random.default_rng(1)
    losses: list[float] = []
    for _ in track(range(epochs), description="Training", disable=not sys.stdout.isatty()):
        order = rng.permutation(len(x))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batches = Shard(shards(x[chosen], y[chosen], dp), "dp")
            losses = group.call("step", batches, collect="dp").result()
    print("last loss per dp coordinate:", ", ".join(f"{loss:.3f}" for loss in losses))
    call = group.call("correct", Shard(shards(test_x, test_y, dp), "dp"), collect="dp")
    return sum(call.result()) / len(test_x)


def main(argv: list[str] | None = None) -> int:
    parser = _Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--dp", type=_at_least_one, default=2, help="data-parallel size")
    parser.add_argument("--tp", type=_at_least_one, default=2, help="tensor-parallel size")
    parser.add_argument("--epochs", type=_at_least_one, default=30)
    parser.add_argument("--hidden", type=_at_least_one, default=128, help="size of the hidden layer")
    parser.add_argument("--address", help="address of a Ray cluster (default: a running local one, or a new one)")
    options = parser.parse_args(argv)
    if options.hidden % options.tp:
        parser.error(f"argument --tp: {options.tp} does not divide the hidden layer of {options.hidden}")
    if options.dp > 96:
        parser.error(f"argument --dp: at most 96, the size of a batch, got {options.dp}")

    began = time.monotonic()
    axes = NamedSharding.from_shape(dp=options.dp, tp=options.tp)
    try:
        init_ray(address=options.address, num_cpus=max(axes.size, 1))
        with RayVirtualCluster([axes.size], use_gpus=False, name="digits", reserve_timeout_s=30) as cluster:
            builder = RayWorkerBuilder(DigitsWorker, hidden=options.hidden, lr=3e-3)
            with RayWorkerGroup(cluster, builder, name_prefix="digits", sharding_annotations=axes) as group:
                cluster.print_cluster_grid(group)
                group.call("connect").result()
                accuracy = train(group, dp=options.dp, epochs=options.epochs)
                print(group.statistics())
                group.shutdown(cleanup_method="disconnect")
    except (PlacementError, ValueError) as error:
        Console(stderr=True).print(f"train_digits: {error}", markup=False, highlight=False)
        return 1
    finally:
        ray.shutdown()
    print(f"test accuracy {accuracy:.2%} after {time.monotonic() - began:.0f} s")
    return 0 if accuracy > 0.95 or options.epochs < 30 else 1


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"train_digits: {message}\n")


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


if __name__ == "__main__":
    sys.exit(main())
