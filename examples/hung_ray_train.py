# SPDX-License-Identifier: Apache-2.0
"""A training with Ray Train that hangs, because one rank gets no more data. It does not use Fairlead.

Run `python -m fairlead_inspect why` in another terminal while it hangs, or let `--why` do that. Needs torch and
ray[train].
"""

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

RANKS, LOOK_AFTER_S, DEADLINE_S = 4, 15.0, 180.0


def next_batch(batches: queue.Queue[float]) -> float:
    return batches.get()


def fit(config: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist

    rank = ray.train.get_context().get_world_rank()
    batches: queue.Queue[float] = queue.Queue()
    # The loader of rank 2 ends early: with a corrupt file, say.
    for step in range(3 if rank == 2 else 1000):
        batches.put(float(step))
    while True:
        if rank == 2 and batches.empty():
            Path(config["hangs"]).touch()
        gradient = torch.full((1000,), next_batch(batches))
        dist.all_reduce(gradient)


def look(hangs: Path) -> None:
    """Look at the job once it hangs, and end it."""
    found, deadline = None, time.monotonic() + DEADLINE_S
    try:
        while not hangs.exists() and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(LOOK_AFTER_S)
        # On a busy machine the first look may come before the other ranks wait.
        why = [sys.executable, "-m", "fairlead_inspect", "why", "--after", "5", "--watch", "5"]
        address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        print("python -m fairlead_inspect why", flush=True)
        found = subprocess.run(why, env={**os.environ, **address}, timeout=DEADLINE_S).returncode
    finally:
        os._exit(0 if found == 1 else 1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--why", action="store_true", help="look at the job once it hangs, and end it")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hangs = Path(folder) / "hangs"
        ray.init(num_cpus=RANKS + 1, log_to_driver=False)
        if chosen.why:
            threading.Thread(target=look, args=(hangs,), daemon=True).start()
        else:
            print("The job hangs. Look at it from another terminal: python -m fairlead_inspect why", flush=True)
        scaling = ScalingConfig(num_workers=RANKS, use_gpu=False)
        config = {"hangs": str(hangs)}
        TorchTrainer(
            fit, train_loop_config=config, scaling_config=scaling, run_config=RunConfig(storage_path=folder)
        ).fit()


if __name__ == "__main__":
    main()
