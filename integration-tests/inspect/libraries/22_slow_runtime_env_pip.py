# SPDX-License-Identifier: Apache-2.0
"""A task has a pip runtime environment, and the package index of the company accepts connections but never answers."""

import socket

import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core (runtime_env)",
    "guilty": "nobody: the task score waits for its runtime environment",
    "function": None,
    "pending": "score",
    "note": "pip install in the runtime environment agent stands in a read from the index",
}


@ray.remote
def clean(row):
    return row.strip()


@ray.remote
def score(rows):
    return len(rows)


if __name__ == "__main__":
    start_ray(num_cpus=2, object_store_memory=400_000_000)
    rows = ray.get([clean.remote(f" row {i} ") for i in range(10)])
    index = socket.create_server(("127.0.0.1", 0), backlog=20)
    pip = {
        "packages": ["tiny-scoring-lib==1.0"],
        "pip_install_options": ["--timeout=900", f"--index-url=http://127.0.0.1:{index.getsockname()[1]}/simple"],
    }
    reference = score.options(runtime_env={"pip": pip, "env_vars": {}}).remote(rows)
    mark(pending="score")
    print(ray.get(reference))
