# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits on a dp x tp group of workers, with numpy alone.

Batches are sharded over `dp`, and the hidden layer is split over `tp`. Each step reduces over both axes: it sums
activations over `tp`, and averages gradients over `dp`. The driver passes the call that produces the parts to the call
that reduces them, so it neither waits for them nor fetches them.

    python examples/train_digits.py --dp 2 --tp 2 --epochs 30
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import ray
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

from fairlead_placement import PlacementError, RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_workergroup import Call, RayWorkerBuilder, RayWorkerGroup, Shard, current_worker

PIXELS, CLASSES, BATCH = 64, 10, 96
Pair = tuple[np.ndarray, np.ndarray]


class DigitsWorker:
    """A worker that trains one shard of the model on one shard of the data."""

    def __init__(self, hidden: int, lr: float) -> None:
        worker = current_worker()
        tp, tp_rank = worker.sharding.get_axis_size("tp"), worker.coords["tp"]
        mine = slice(tp_rank * hidden // tp, (tp_rank + 1) * hidden // tp)
        rng = np.random.default_rng(0)  # Every worker creates the same full matrices, and keeps its part of them.
        inner = rng.uniform(-1, 1, (PIXELS, hidden)) / np.sqrt(PIXELS)
        outer = rng.uniform(-1, 1, (hidden, CLASSES)) / np.sqrt(hidden)
        self.weights = [inner[:, mine], np.zeros(hidden)[mine], outer[mine], np.zeros(CLASSES)]
        self.moments = [(np.zeros_like(weight), np.zeros_like(weight)) for weight in self.weights]
        self.lr, self.steps, self.loss = lr, 0, 0.0

    def forward(self, batch: Pair) -> np.ndarray:
        """Return this worker's part of the logits. Their sum over `tp` is complete but for the bias."""
        self.batch = batch
        inner, inner_bias, outer, _ = self.weights
        self.hidden = np.maximum(batch[0] @ inner + inner_bias, 0)
        return self.hidden @ outer

    def backward(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the gradients of this worker's weights, from the logits' parts of all `tp` coordinates."""
        x, y = self.batch
        logits = np.sum(parts, axis=0) + self.weights[3]
        logits -= logits.max(axis=1, keepdims=True)
        grad = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        rows = np.arange(len(y))
        self.loss = float(-np.log(grad[rows, y]).mean())
        grad[rows, y] -= 1
        grad /= len(y)
        inner_grad = (grad @ self.weights[2].T) * (self.hidden > 0)
        return [x.T @ inner_grad, inner_grad.sum(axis=0), self.hidden.T @ grad, grad.sum(axis=0)]

    def update(self, gradients: Sequence[list[np.ndarray]]) -> float:
        """Take a step of Adam with the mean of the gradients of all `dp` coordinates, and return the loss."""
        self.steps += 1
        for at, (first, second) in enumerate(self.moments):
            grad = np.mean([one[at] for one in gradients], axis=0)
            first += 0.1 * (grad - first)
            second += 0.001 * (grad**2 - second)
            step = first / (1 - 0.9**self.steps) / (np.sqrt(second / (1 - 0.999**self.steps)) + 1e-8)
            self.weights[at] = self.weights[at] - self.lr * step
        return self.loss

    def correct(self, parts: Sequence[np.ndarray]) -> int:
        """Return the number of digits of the last batch that the model classifies correctly."""
        logits = np.sum(parts, axis=0) + self.weights[3]
        return int((logits.argmax(axis=1) == self.batch[1]).sum())


def digits(seed: int = 0) -> tuple[Pair, Pair]:
    """Return (pixels, labels) of the training set and of the test set."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] / 16.0).astype(np.float32), y[order].astype(np.int64)
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def shards(x: np.ndarray, y: np.ndarray, dp: int) -> list[Pair]:
    """Return the shard of the data for each dp coordinate."""
    return list(zip(np.array_split(x, dp), np.array_split(y, dp), strict=True))


def forward(group: RayWorkerGroup, batches: list[Pair]) -> list[Call[np.ndarray]]:
    """Return a call for each dp coordinate, whose results are the parts of the logits for each tp coordinate."""
    return [group.at(dp=at).call("forward", batch) for at, batch in enumerate(batches)]


def take_step(group: RayWorkerGroup, batches: list[Pair], tp: int) -> list[float]:
    """Train on one batch, and return the loss at each dp coordinate."""
    parts = Shard(forward(group, batches), "dp")
    columns = [group.at(tp=at) for at in range(tp)]
    # The gradients of one tp coordinate on all dp coordinates: their mean is what each worker of that column needs.
    gradients = [column.call("backward", parts) for column in columns]
    updates = [column.call("update", each) for column, each in zip(columns, gradients, strict=True)]
    # All tp coordinates have the same loss.
    return [update.result(timeout=120) for update in updates][-1]


def train(group: RayWorkerGroup, *, dp: int, tp: int, epochs: int) -> tuple[float, list[float]]:
    """Train, and return the accuracy on the test set and the mean loss of each epoch."""
    (x, y), (test_x, test_y) = digits()
    rng = np.random.default_rng(1)
    losses: list[float] = []
    for _ in track(range(epochs), description="Training", disable=not sys.stdout.isatty()):
        order = rng.permutation(len(x))
        batches = [shards(x[chosen], y[chosen], dp) for chosen in np.split(order, len(x) // BATCH)]
        losses.append(float(np.mean([take_step(group, batch, tp) for batch in batches])))
    parts = Shard(forward(group, shards(test_x, test_y, dp)), "dp")
    correct = group.at(tp=0).call("correct", parts, timeout=120).result()
    return sum(correct) / len(test_x), losses


def draw_curve(values: list[float], *, width: int = 60, height: int = 6) -> str:
    """Return a curve as text, with the largest and the last value beside it."""
    at = np.linspace(0, len(values) - 1, min(width, 2 * len(values)))
    heights = np.interp(at, range(len(values)), values) / max(values) * height * 8
    rows = []
    for row in reversed(range(height)):
        filled = np.clip(np.ceil(heights - row * 8), 0, 8).astype(int)
        label = f"{max(values):.2f}" if row == height - 1 else f"{values[-1]:.2f}" if row == 0 else ""
        rows.append(f"{label:>6} │{''.join(' ▁▂▃▄▅▆▇█'[level] for level in filled)}".rstrip())
    return "\n".join([*rows, f"{'loss':>6} └{'─' * len(at)} epoch {len(values)}"])


def main(argv: list[str] | None = None) -> int:
    options = read_options(argv, __doc__)
    began = time.monotonic()
    builder = RayWorkerBuilder(DigitsWorker, hidden=options.hidden, lr=3e-3)

    def work(group: RayWorkerGroup) -> float:
        accuracy, losses = train(group, dp=options.dp, tp=options.tp, epochs=options.epochs)
        print(draw_curve(losses))
        return accuracy

    return run(builder, work, options, began)


def run(
    builder: RayWorkerBuilder, work: Callable[[RayWorkerGroup], float], options: argparse.Namespace, began: float
) -> int:
    """Start the group, let `work` train it, print the accuracy that it returns, and return the exit status."""
    axes = NamedSharding.from_shape(dp=options.dp, tp=options.tp)
    try:
        init_ray(address=options.address, num_cpus=axes.size)
        with (
            RayVirtualCluster([axes.size], use_gpus=False, name="digits", reserve_timeout_s=30) as cluster,
            RayWorkerGroup(cluster, builder, name_prefix="digits", sharding_annotations=axes) as group,
        ):
            cluster.print_cluster_grid(group)
            accuracy = work(group)
    except (PlacementError, ValueError) as error:
        Console(stderr=True).print(f"train_digits: {error}", markup=False, highlight=False)
        return 1
    finally:
        ray.shutdown()
    print(f"test accuracy {accuracy:.2%} after {time.monotonic() - began:.0f} s")
    return 0 if accuracy > 0.95 or options.epochs < 30 else 1


def read_options(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """Return the options of the command line; exit with one line if they are wrong."""
    parser = _Parser(description=(description or "").split("\n")[0])
    parser.add_argument("--dp", type=_at_least_one, default=2, help="data-parallel size")
    parser.add_argument("--tp", type=_at_least_one, default=2, help="tensor-parallel size")
    parser.add_argument("--epochs", type=_at_least_one, default=30)
    parser.add_argument("--hidden", type=_at_least_one, default=128, help="size of the hidden layer")
    own = os.environ.get("RAY_ADDRESS") or "local"
    parser.add_argument("--address", default=own, help="address of a Ray cluster (default: RAY_ADDRESS, or a new one)")
    options = parser.parse_args(argv)
    if options.hidden % options.tp:
        parser.error(f"argument --tp: {options.tp} does not divide the hidden layer of {options.hidden}")
    if options.dp > BATCH:
        parser.error(f"argument --dp: at most {BATCH}, the size of a batch, got {options.dp}")
    return options


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
