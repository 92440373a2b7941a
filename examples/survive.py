# SPDX-License-Identifier: Apache-2.0
"""Train the model of train_digits_torch.py twice, the second time with a worker killed in the middle.

A collective fails if any of its members dies, so the whole group restarts (`Restart(scope="group")`) on a new port, and
every worker reloads the last checkpoint that all workers have written (`Restart.method`). The driver continues from the
step of that checkpoint. Both runs end with exactly the same accuracy.

    python examples/survive.py --steps 300
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
from rich.progress import Progress
from train_digits import BATCH, digits, shards
from train_digits_torch import DigitsWorker

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart, Shard, WorkerFailureError, current_worker
from fairlead_workergroup.testing import kill

DP, TP = 2, 2


class CheckpointingWorker(DigitsWorker):
    """A worker that saves its part of the model, and continues from the last complete checkpoint after a restart."""

    def __init__(self, hidden: int, lr: float, folder: str) -> None:
        super().__init__(hidden, lr)
        self.folder = Path(folder)

    def save(self, step: int) -> None:
        import torch

        file = self.folder / f"{step}-rank-{current_worker().rank}.pt"
        torch.save({"weights": self.weights, "optimizer": self.optimizer.state_dict()}, file)

    def restore(self) -> None:
        """Join the restarted group, and load the last complete checkpoint if there is one (see `Restart.method`)."""
        import torch

        self.connect()
        if (step := last_step(self.folder)) == 0:
            return
        saved = torch.load(self.folder / f"{step}-rank-{current_worker().rank}.pt", weights_only=True)
        for weight, value in zip(self.weights, saved["weights"], strict=True):
            weight.data.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])


def last_step(folder: Path) -> int:
    """Return the step of the last complete checkpoint, which the driver records once every worker has saved."""
    record = folder / "last-step"
    return int(record.read_text()) if record.exists() else 0


def train(group: RayWorkerGroup, folder: Path, *, steps: int, save_every: int, kill_at: int | None) -> float:
    """Train step by step across failures of workers, and return the accuracy on the test set."""
    (x, y), (test_x, test_y) = digits()
    step = 0
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("Training", total=steps)
        while step < steps:
            if step == kill_at:
                kill_at = None
                print(f"step {step}: killing rank 1")
                kill(group, 1)
            # The batch depends on the step only, so a step can be repeated.
            chosen = np.random.default_rng(step).choice(len(x), BATCH, replace=False)
            try:
                group.call("step", Shard(shards(x[chosen], y[chosen], DP), "dp"), collect="dp", timeout=120).result()
                step += 1
                if step % save_every == 0:
                    group.call("save", step, discard=True, timeout=120).result()
                    (folder / "last-step").write_text(str(step))
            except WorkerFailureError as error:
                # The next call restarts the group, and its workers reload the checkpoint of this step.
                step = last_step(folder)
                print(f"lost rank {', '.join(str(lost.rank) for lost in error.failures)}; continuing from step {step}")
            progress.update(bar, completed=step)
    call = group.call("correct", Shard(shards(test_x, test_y, DP), "dp"), collect="dp", timeout=120)
    return sum(call.result()) / len(test_x)


def run(cluster: RayVirtualCluster, *, steps: int, save_every: int, kill_at: int | None) -> float:
    """Run one training, and return the accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        builder = RayWorkerBuilder(CheckpointingWorker, hidden=128, lr=3e-3, folder=folder)
        options = {"restart": Restart(on_failure=True, scope="group", method="restore")}
        axes = NamedSharding.from_shape(dp=DP, tp=TP)
        with RayWorkerGroup(cluster, builder, name_prefix="digits", sharding_annotations=axes, **options) as group:
            group.call("connect", timeout=120).result()
            began = time.monotonic()
            accuracy = train(group, Path(folder), steps=steps, save_every=save_every, kill_at=kill_at)
            incarnations = sorted({status.incarnation for status in group.get_worker_status()})
            print(f"accuracy {accuracy:.2%} after {time.monotonic() - began:.1f} s, incarnations {incarnations}")
            group.shutdown(cleanup_method="disconnect")
    return accuracy


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=40, help="steps between checkpoints")
    own = os.environ.get("RAY_ADDRESS") or "local"
    parser.add_argument("--address", default=own, help="address of a Ray cluster (default: RAY_ADDRESS, or a new one)")
    options = parser.parse_args(argv)
    if options.steps < 2 or options.save_every < 1:
        parser.error("--steps must be at least 2, and --save-every at least 1")
    init_ray(address=options.address, num_cpus=DP * TP)
    try:
        with RayVirtualCluster([DP * TP], use_gpus=False, name="digits", reserve_timeout_s=30) as cluster:
            length = {"steps": options.steps, "save_every": options.save_every}
            print("without failures:")
            uninterrupted = run(cluster, **length, kill_at=None)
            print("with a worker killed in the middle:")
            survived = run(cluster, **length, kill_at=options.steps // 2 + options.save_every // 3)
    finally:
        ray.shutdown()
    print("the same accuracy" if survived == uninterrupted else "NOT the same accuracy")
    return 0 if survived == uninterrupted and (survived > 0.93 or options.steps < 300) else 1


if __name__ == "__main__":
    sys.exit(main())
