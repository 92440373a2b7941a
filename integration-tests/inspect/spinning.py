# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait as under NCCL, without a GPU: their threads spin in C, below the frames of `torch.distributed`.

A backend in Python moves no data. A collective counts its ranks in shared memory, and `Work.wait` is a C function that
spins until all have come, so that no Python frame is above torch's. `python spinning.py CASE` runs four actors.
"""

import ctypes
import functools
import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time

import ray

SIZE = 4
PAGE = 1 << 16
SOURCE = """
void come(long *count) { __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST); }
int wait_for(volatile long *count, long ranks) { while (*count < ranks) { } return 1; }
"""


def load_library():
    """Compile the two functions once for this user, and load them; a call of them releases the GIL."""
    digest = hashlib.sha1(SOURCE.encode()).hexdigest()[:8]
    path = os.path.join(tempfile.gettempdir(), f"fairlead-spin-{os.getuid()}-{digest}.so")
    if not os.path.exists(path):
        own = f"{path}.{os.getpid()}"
        compiler = ["gcc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", own]
        subprocess.run(compiler, input=SOURCE.encode(), check=True)
        os.replace(own, path)
    return ctypes.CDLL(path)


def make_group(rank, size, name, ranks):
    """Return a process group whose collectives are over when `ranks` ranks have come: with one too many, never."""
    import torch.distributed as dist

    class Work(dist.Work):
        pass

    class Group(dist.ProcessGroup):
        def __init__(self):
            super().__init__(rank, size)
            with open(f"/dev/shm/{name}", "a+b") as file:
                file.truncate(PAGE)
                self.memory = mmap.mmap(file.fileno(), PAGE)
            self.library, self.turn = load_library(), 0
            self.counts = (ctypes.c_long * (PAGE // 8)).from_buffer(self.memory)
            self.ranks = ranks
            # Waits for ever, as `Tensor.item` does for a kernel that does not end; in C as well.
            last = ctypes.byref(self.counts, PAGE - 8)
            self.item = functools.partial(self.library.wait_for, last, ctypes.c_long(1))

        def collective(self, *_, **__):
            count = ctypes.byref(self.counts, 8 * self.turn)
            self.turn += 1
            self.library.come(count)
            work = Work()
            work.wait = functools.partial(self.library.wait_for, count, ctypes.c_long(self.ranks))
            return work

        barrier = allreduce = broadcast = collective

    return Group()


class Rank:
    def __init__(self, rank, name):
        self.rank, self.name = rank, name
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE), MASTER_ADDR="127.0.0.1")

    def join(self, port, ranks):
        import torch.distributed as dist

        os.environ["MASTER_PORT"] = str(port)

        def create(store, rank, size, timeout):
            return make_group(rank, size, self.name, ranks)

        dist.Backend.register_backend("spin", create, devices=["cpu"])
        dist.init_process_group("spin")
        return os.getpid()

    def step(self, case):
        import torch.distributed as dist

        if self.rank == SIZE - 1 and case in ("late", "late_for_item"):
            next_batch()
        if case == "late_for_item":
            loss = dist.group.WORLD
            loss.item()
        dist.barrier()


def next_batch():
    time.sleep(3600)


def main(case):
    ray.init(logging_level="error", log_to_driver=False)
    name = f"fairlead-spin-{os.getpid()}"
    actors = [ray.remote(num_cpus=0)(Rank).remote(rank, name) for rank in range(SIZE)]
    port = 20000 + os.getpid() % 10000
    pids = ray.get([one.join.remote(port, SIZE + (case == "all")) for one in actors])
    calls = [one.step.remote(case) for one in actors]
    time.sleep(2)
    sys.stdout.write(json.dumps({"job": ray.get_runtime_context().get_job_id(), "pids": pids}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    os.unlink(f"/dev/shm/{name}")
    del calls


if __name__ == "__main__":
    main(sys.argv[1])
