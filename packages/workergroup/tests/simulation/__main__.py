# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201
"""Run the simulation: `python -m simulation` in the folder of the tests, with `--seed N` to replay one run."""

import argparse
import os
import sys

from .exploration import explore, run_seed
from .scripts import run_group


def main() -> str:
    parser = argparse.ArgumentParser(prog="simulate", description="Run the simulation of interleavings.")
    parser.add_argument("--seed", type=int, help="replay the run of this seed, and print its history")
    parser.add_argument("--runs", type=int, default=10_000, help="how many seeds to run")
    options = parser.parse_args()
    if options.seed is None:
        return explore(run_group, range(options.runs))
    world = run_seed(run_group, options.seed)
    print(*world.history, sep="\n")
    return str(world.failure or "")


if __name__ == "__main__":
    # The order of a set of texts depends on it, and with that the history of a run.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main() or None)
