# SPDX-License-Identifier: Apache-2.0
"""The driver polls with ray.wait; one task waits for `sort`, which waits for the end of an input that the task never closes."""

import subprocess

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core",
    "guilty": "worker of the task sort_shard(3), and its child sort",
    "function": "sort_shard",
    "note": "child.wait() in the worker, read of stdin in the child: a circular wait of two processes",
}


@ray.remote
def sort_shard(shard):
    lines = "".join(f"{i * 7919 % 101}\n" for i in range(100))
    child = subprocess.Popen(["sort", "-n"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdin.write(lines)
    child.stdin.flush()
    if shard != 3:
        child.stdin.close()
    else:
        mark(pids=[child.pid])
    child.wait()
    return child.stdout.read().count("\n")


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    pending = [sort_shard.remote(shard) for shard in range(6)]
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=2.0)
        for reference in done:
            print("lines:", ray.get(reference), flush=True)
        print("still to do:", len(pending), flush=True)
