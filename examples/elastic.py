# SPDX-License-Identifier: Apache-2.0
"""Train with DDP while the group grows from two to three workers, loses and restarts one, and shrinks to two again.

The batch of a step depends on the number of the step only, and is split over the workers that there are. So the loss
has to be that of a training in one process, whatever happens to the group, up to the rounding of sums in another order.
The example draws both curves, and fails if they differ.

After each change all workers run `connect`: they join a new process group, new workers get the parameters and the
moments of Adam from the others, and the model is wrapped again.

    pip install torch matplotlib
    python examples/elastic.py
"""

import argparse
import os
import sys
import time

import numpy as np
import ray
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_workergroup import Elastic, RayWorkerGroup, Shard, WorkerFailureError
from fairlead_workergroup.testing import kill
from fairlead_workergroup.torch import broadcast_state, destroy, init_process_group, wrap_ddp

FEATURES, BATCH = 16, 768  # 768 rows can be split over two and over three workers
TOLERANCE = 1e-3  # relative
Rows = tuple[np.ndarray, np.ndarray]  # inputs and values


class Trainer:
    """A worker that holds a replica of the model, and trains on its rows of each batch."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)

    def connect(self) -> int:
        """Join the workers of now, take over their state, and return the number of steps that they have taken."""
        # If a worker is lost in the middle of a collective, the others may wait so long for each other.
        init_process_group(timeout_s=15)
        broadcast_state(self.model, self.optimizer)
        self.ddp = wrap_ddp(self.model)
        return next((int(state["step"]) for state in self.optimizer.state.values()), 0)

    def step(self, rows: Rows) -> float:
        """Take a step, and return the mean loss over this worker's rows."""
        return take_step(self.ddp, self.optimizer, rows)

    def state(self) -> list[bytes]:
        """Return the bits of the parameters and of the moments of Adam."""
        moments = [moment for state in self.optimizer.state.values() for moment in state.values()]
        return [value.detach().numpy().tobytes() for value in (*self.model.parameters(), *moments)]

    def disconnect(self) -> None:
        destroy()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Rows) -> float:
    """Train on some rows, and return the mean loss over them."""
    x, y = map(torch.tensor, rows)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def make_batch(step: int) -> Rows:
    """Return the rows of a step, and the values of a fixed function that the model has to learn."""
    x = np.random.default_rng(step).standard_normal((BATCH, FEATURES), dtype="float32")
    return x, np.sin(x[:, :4]).sum(axis=1, keepdims=True) * np.cos(x[:, 4:5])


def train_alone(steps: int) -> list[float]:
    """Train in this process, and return the loss of each step."""
    model = make_model()
    optimizer = make_optimizer(model)
    return [take_step(model, optimizer, make_batch(step)) for step in range(steps)]


def train(group: RayWorkerGroup, steps: int) -> tuple[list[float], dict[int, str]]:
    """Train while the group changes. Return the loss of each step, and what happened before which step."""
    changes = {
        steps // 4: ("grows to dp=3", lambda: group.resize(dp=3)),
        steps // 2: ("loses rank 1", lambda: kill(group, 1)),
        3 * steps // 4: ("shrinks to dp=2", lambda: group.resize(dp=2)),
    }
    losses: list[float] = []
    events: dict[int, str] = {}
    while (step := len(losses)) < steps:
        began, happened = time.monotonic(), step in changes
        if happened:
            events[step], change = changes.pop(step)
            change()
        x, y = make_batch(step)
        dp = group.sharding_annotations.get_axis_size("dp")
        rows = list(zip(np.split(x, dp), np.split(y, dp), strict=True))
        try:
            losses.append(float(np.mean(group.call("step", Shard(rows, "dp"), timeout=120).result())))
        except WorkerFailureError:
            group.restart_failed_workers()
            # All have the state of one of them now, and continue after its last step.
            del losses[group.call("connect", timeout=120).result()[0] :]
        if happened:
            print(f"step {step:4}: {events[step]}, epoch {group.state().group_epoch}, {time.monotonic() - began:.1f} s")
    return losses, events


def draw(losses: list[float], alone: list[float], events: dict[int, str], path: str) -> None:
    """Draw both loss curves as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log", title="One training on 2, 3, 3 and 2 workers")
    axes.plot(alone, color="tab:orange", linewidth=4, alpha=0.5, label="in one process")
    axes.plot(losses, color="tab:blue", linewidth=1.2, label="on the group")
    for step, event in events.items():
        axes.axvline(step, color="grey", linestyle=":")
        axes.annotate(event, (step, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top")
    axes.legend(loc="lower left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--plot", default="elastic-loss.png", help="file for the loss curves")
    own = os.environ.get("RAY_ADDRESS") or "local"
    parser.add_argument("--address", default=own, help="address of a Ray cluster (default: RAY_ADDRESS, or a new one)")
    options = parser.parse_args(argv)
    if options.steps < 8:
        parser.error(f"argument --steps: must be at least 8, got {options.steps}")
    began = time.monotonic()
    init_ray(address=options.address, num_cpus=4)
    try:
        with (
            RayVirtualCluster([3], use_gpus=False, reserve_timeout_s=30) as cluster,
            RayWorkerGroup(
                cluster,
                Trainer,
                name_prefix="trainer",
                workers_per_node=[2],
                sharding_annotations=NamedSharding.from_shape(dp=2),
                elastic=Elastic(on_resize="connect"),
            ) as group,
        ):
            group.call("connect", timeout=120).result()
            losses, events = train(group, options.steps)
            one, other = group.call("state").result()
            group.shutdown(cleanup_method="disconnect")
    finally:
        ray.shutdown()
    alone = train_alone(options.steps)
    draw(losses, alone, events, options.plot)
    difference = float(np.max(np.abs(np.array(losses) / np.array(alone) - 1)))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; at most {difference:.1e} from that in one process (relative)")
    print(f"parameters and moments are {'equal' if one == other else 'NOT equal'} on both workers")
    print(f"wrote the loss curves to {options.plot} after {time.monotonic() - began:.0f} s")
    return 0 if one == other and difference < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
