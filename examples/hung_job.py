# SPDX-License-Identifier: Apache-2.0
"""A hand-written training on Ray that hangs, because one rank gets no more data. It does not use Fairlead.

Run `python -m fairlead_inspect why` in another terminal while it hangs, or let `--why` do that. Needs torch.
"""

import argparse
import os
import queue
import socket
import subprocess
import sys

import ray

LOOK_AFTER_S, DEADLINE_S = 8.0, 180.0


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, rank: int, world_size: int, port: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.rank = rank
        self.batches: queue.Queue[float] = queue.Queue()
        # The loader of rank 5 ends early: with a corrupt file, say.
        for step in range(3 if rank == 5 else 1000):
            self.batches.put(float(step))

    def fit(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        while True:
            self.step(self.next_batch())

    def next_batch(self) -> float:
        return self.batches.get()

    def step(self, batch: float) -> None:
        import torch
        import torch.distributed as dist

        gradient = torch.full((1000,), batch)
        dist.all_reduce(gradient)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--why", action="store_true", help="look at the job once it hangs, and end it")
    arguments.add_argument("--ranks", type=int, default=8)
    chosen = arguments.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ray.init(num_cpus=2, log_to_driver=False)
    trainers = [Trainer.options(name=f"trainer-{r}").remote(r, chosen.ranks, port) for r in range(chosen.ranks)]
    running = [trainer.fit.remote() for trainer in trainers]
    if not chosen.why:
        print("The job hangs. Look at it from another terminal: python -m fairlead_inspect why", flush=True)
        ray.get(running)
    # Until all ranks but one wait in the collective of the fourth step.
    ended, _ = ray.wait(running, timeout=LOOK_AFTER_S + 2 * chosen.ranks)
    assert not ended, ray.get(ended)
    # On a busy machine the first look may come before the job hangs.
    why = [sys.executable, "-m", "fairlead_inspect", "why", "--after", "5", "--watch", "5"]
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    print("python -m fairlead_inspect why", flush=True)
    found = subprocess.run(why, env={**os.environ, **address}, timeout=DEADLINE_S).returncode
    sys.exit(0 if found == 1 else f"why found no cause: its exit status was {found}, and 1 was expected")


if __name__ == "__main__":
    main()
