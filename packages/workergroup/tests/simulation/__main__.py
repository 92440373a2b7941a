# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201
"""Run the simulation: `python -m simulation` in the folder of the tests, with `--seed N` to replay one run."""

import argparse
import os
import sys

from .exploration import describe, explore, run_seed
from .scripts import run_group


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulate", description="Run the simulation of interleavings.")
    parser.add_argument("--seed", type=int, help="replay the run of this seed, and print its history")
    parser.add_argument("--runs", type=int, default=10_000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    options = parser.parse_args()
    if options.seed is not None:
        one = run_seed(run_group, options.seed, keep=True)
        print(*one.history, sep="\n")
        print(f"{one.steps} steps, {len(one.choices)} choices: {one.failure or 'no rule was broken'}")
        return int(one.failure is not None)
    # The parts of a run that is divided between several processes do not share a processor.
    part = options.first // max(1, options.runs)
    report = explore(run_group, range(options.first, options.first + options.runs), part)
    print(report)
    if report.failed is None:
        return 0
    print(describe(report.seed, report.failed))
    return 1


if __name__ == "__main__":
    # The order of a set of texts depends on it, and with that the history of a run.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
