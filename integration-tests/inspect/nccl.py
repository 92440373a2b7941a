# SPDX-License-Identifier: Apache-2.0
"""Jobs whose four ranks share a GPU and reduce with NCCL, as programs that know nothing of Fairlead: `nccl.py CASE`.

They report as those of jobs.py do. NCCL refuses two ranks of a host on one GPU, so each rank says that it is another
host, and they talk by sockets.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta

import jobs
import ray

HANG_NS = 10**15


@ray.remote(num_cpus=0, num_gpus=1 / jobs.SIZE)
class Trainer(jobs.Rank):
    """A rank on its part of the GPU."""

    def __init__(self, rank, size, port, prefix=""):
        super().__init__(rank, size, port)
        os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_MAX_NCHANNELS="1")
        if prefix:
            os.environ.update(TORCH_FR_DUMP_TEMP_FILE=prefix, TORCH_NCCL_DEBUG_INFO_TEMP_FILE=prefix)
            os.environ.update(TORCH_FR_BUFFER_SIZE="2000", TORCH_NCCL_TRACE_BUFFER_SIZE="2000")
            # The watchdog writes what it knows after the time-out, and leaves the process alone.
            os.environ.update(TORCH_NCCL_DUMP_ON_TIMEOUT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")

    def join(self, timeout_s=1800.0):
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(0)
        dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
        self.reduce()

    def reduce(self, times=1):
        import torch
        import torch.distributed as dist

        for _ in range(times):
            dist.all_reduce(torch.ones(1, device="cuda"))
            wait_for_device()

    def train(self, how, odd):
        self.reduce()
        if self.rank == odd:
            in_kernel() if how == "in_kernel" else jobs.HANGS[how]()
        else:
            self.reduce()


def wait_for_device():
    import torch

    torch.cuda.synchronize()


def in_kernel():
    """Wait for a kernel of its own that does not end."""
    import torch

    torch.cuda._sleep(HANG_NS)
    wait_for_device()


def make_ranks(**options):
    port, timeout_s = jobs.free_port(), options.pop("timeout_s", 1800.0)
    ranks = [Trainer.remote(rank, jobs.SIZE, port, **options) for rank in range(jobs.SIZE)]
    ray.get([one.join.remote(timeout_s) for one in ranks])
    return ranks


def hang(how, odd=2):
    ranks = make_ranks()
    jobs.wait_in_get([one.train.remote(how, odd) for one in ranks])


def dumped(how, odd=2):
    """Hang until the watchdog of each rank that waits has written what the flight recorder has."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = make_ranks(prefix=f"{folder}/rank_", timeout_s=10.0)
        refs = [one.train.remote(how, odd) for one in ranks]
        jobs.wait_in_get(refs, [f"{folder}/rank_{rank}" for rank in range(jobs.SIZE)])


def end(number):
    ranks = make_ranks()
    pid = ray.get(ranks[2].pid.remote())
    refs = [one.reduce.remote(10**9) for one in ranks]
    time.sleep(1)
    os.kill(pid, number)
    jobs.wait_in_get(refs)


def healthy():
    ranks = make_ranks()
    jobs.wait_in_get([one.reduce.remote(10**9) for one in ranks])


CASES = {
    "in_queue": lambda: hang("in_queue"),
    "in_kernel": lambda: hang("in_kernel"),
    "dumped": lambda: dumped("in_kernel"),
    "stopped": lambda: end(signal.SIGSTOP),
    "killed": lambda: end(signal.SIGKILL),
    "healthy": healthy,
}


if __name__ == "__main__":
    threading.Thread(target=jobs.end_with_input, daemon=True).start()
    ray.init(log_to_driver=False, logging_level="error")
    CASES[sys.argv[1]]()
