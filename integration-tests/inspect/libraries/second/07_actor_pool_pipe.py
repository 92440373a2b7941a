# SPDX-License-Identifier: Apache-2.0
"""An actor of an ActorPool waits for a gzip child whose output pipe is full because nobody reads it."""

import gzip
import os
import subprocess
import tempfile

import ray
from hangs import mark, start_ray
from ray.util import ActorPool

TRUTH = {
    "hangs": True,
    "library": "util.ActorPool",
    "guilty": "Unpacker actor and its gzip child (deadlock)",
    "function": "unpack",
    "note": "Popen(stdout=PIPE) followed by wait()",
}


@ray.remote
class Unpacker:
    def __init__(self):
        self.files = 0

    def unpack(self, path):
        child = subprocess.Popen(["gzip", "-dc", path], stdout=subprocess.PIPE)
        if os.path.getsize(path) > 20_000:
            mark(pids=[os.getpid(), child.pid])
        if child.wait() != 0:
            raise RuntimeError(f"cannot unpack {path}")
        text = child.stdout.read()
        self.files += 1
        return text.count(b"\n")


def write_files(folder):
    paths = []
    for number in range(12):
        lines = 50_000 if number == 8 else 500
        paths.append(os.path.join(folder, f"part-{number}.txt.gz"))
        with gzip.open(paths[-1], "wt") as file:
            file.writelines(f"{number},{line},{line * line}\n" for line in range(lines))
    return paths


if __name__ == "__main__":
    start_ray(num_cpus=4)
    pool = ActorPool([Unpacker.remote() for _ in range(2)])
    paths = write_files(tempfile.mkdtemp())
    total = 0
    for lines in pool.map_unordered(lambda actor, path: actor.unpack.remote(path), paths):
        total += lines
    print("lines:", total)
