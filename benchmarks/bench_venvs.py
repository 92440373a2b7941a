# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of an existing environment and of a new one, against hand-written uv and Ray in one run.

The run needs a package index, or a uv whose cache contains Ray.

python benchmarks/bench_venvs.py
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ray
from _measure import Row, interleaved, table
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from uv import find_uv_bin

from fairlead_venvs import VenvSpec, create_local_venv, create_local_venv_on_each_node

UV = find_uv_bin()
NODES = 4
PROCESSES = 16
REQUIREMENTS = [f"ray=={ray.__version__}"]
PYPROJECT = f"""
[project]
name = "bench"
version = "0.1"
requires-python = ">=3.11"
dependencies = {REQUIREMENTS}
[tool.uv]
package = false
"""
REQUEST_LOOP = """
import sys
from fairlead_venvs import VenvSpec, create_local_venv
spec = VenvSpec(requirements={wanted})
print("up", flush=True)
while name := sys.stdin.readline().strip():
    print(create_local_venv(spec, name), flush=True)
"""


def rows() -> list[Row]:
    """Return every row of the table. The run takes a minute."""
    # The path must be short, because Ray creates sockets in this folder.
    folder = Path(tempfile.mkdtemp(prefix="fl-", dir="/tmp"))
    before = dict(os.environ)
    os.environ.update(FAIRLEAD_VENV_DIR=str(folder / "venvs"), RAY_TMPDIR=str(folder))
    try:
        return [*_warm_rows(folder), *_cold_rows(folder), *_concurrent_rows(), *_warm_node_rows()]
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def _uv(*arguments: str, cwd: Path) -> None:
    # nox names its own environment in both, which `uv sync` would change.
    own = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    env = {name: value for name, value in os.environ.items() if name not in own}
    subprocess.run([UV, *arguments], cwd=cwd, env=env, check=True, capture_output=True)


def _warm_rows(folder: Path) -> Iterator[Row]:
    project = folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(PYPROJECT)
    _uv("lock", cwd=project)
    _uv("sync", cwd=project)
    spec = VenvSpec(project=project)
    create_local_venv(spec)
    by_uv, ours = interleaved(lambda: _uv("sync", cwd=project), lambda: create_local_venv(spec), repeats=51)
    ratio = by_uv.median / ours.median
    yield Row("`uv sync` that finds nothing to do", str(by_uv), "", True)
    yield Row("  an environment that is there", f"{ours}, {ratio:.1f}x faster", "at least 3x faster", ratio >= 3)


def _cold_rows(folder: Path) -> Iterator[Row]:
    numbers = iter(range(1000))
    (folder / "requirements.txt").write_text("\n".join(REQUIREMENTS))

    def compile_by_hand() -> None:
        _uv("pip", "compile", "--python", sys.executable, "-o", "pylock.toml", "requirements.txt", cwd=folder)

    def by_hand() -> None:
        place = folder / f"by-hand-{next(numbers)}"
        _uv("venv", "--relocatable", "--python", sys.executable, str(place), cwd=folder)
        _uv("pip", "sync", "--python", str(place / "bin" / "python"), "pylock.toml", cwd=folder)

    def by_hand_first() -> None:
        (folder / "pylock.toml").unlink()
        compile_by_hand()
        by_hand()

    def ours() -> None:
        create_local_venv(VenvSpec(requirements=REQUIREMENTS), f"cold-{next(numbers)}")

    def ours_first() -> None:
        for note in (folder / "venvs").glob(".note-*"):
            shutil.rmtree(note)
        ours()

    compile_by_hand()
    by_hand()  # Fill uv's cache.
    hand, mine, hand_first, first = interleaved(by_hand, ours, by_hand_first, ours_first, repeats=15)
    ratio, ratio_first = mine.median / hand.median, first.median / hand_first.median
    yield Row("`uv venv`, `uv pip sync` by hand, with Ray", str(hand), "", True)
    yield Row("  by spec, resolved before", f"{mine}, {ratio:.2f}x", "at most 1.3x", ratio <= 1.3)
    yield Row("the same after `uv pip compile` by hand", str(hand_first), "", True)
    yield Row("  by spec, resolved for it", f"{first}, {ratio_first:.2f}x", "at most 1.3x", ratio_first <= 1.3)


def _concurrent_rows() -> Iterator[Row]:
    """Measure how long running processes wait for a new environment, one process alone and all at once, in turns."""
    code = REQUEST_LOOP.format(wanted=REQUIREMENTS)
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)
    ]

    def request(chosen: list["subprocess.Popen[str]"], name: str) -> float:
        start = time.perf_counter()
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
        answers = {process.stdout.readline() for process in chosen if process.stdout is not None}
        seconds = time.perf_counter() - start
        assert len(answers) == 1, answers
        return seconds

    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        times = [(request(processes[:1], f"one-{n}"), request(processes, f"all-{n}")) for n in range(7)]
    finally:
        for process in processes:
            process.communicate()  # This closes the input, which ends the process.
    one, everyone = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = everyone / one
    yield Row("one process asks for a new environment", f"{one:.2f} s", "", True)
    yield Row(f"  {PROCESSES} at once", f"{everyone:.2f} s, {ratio:.2f}x", "at most 1.3x", ratio <= 1.3)


def _warm_node_rows() -> Iterator[Row]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, logging_level="warning")
        cluster.wait_for_nodes()

        def do_nothing() -> None:
            pass

        nothing = ray.remote(num_cpus=0)(do_nothing)

        on_each = [
            nothing.options(scheduling_strategy=NodeAffinitySchedulingStrategy(row["NodeID"], soft=False))
            for row in ray.nodes()
        ]
        spec = VenvSpec(requirements=REQUIREMENTS)
        create_local_venv_on_each_node(spec)
        empty, ours = interleaved(
            lambda: ray.get([task.remote() for task in on_each]),
            lambda: create_local_venv_on_each_node(spec),
            repeats=101,
        )
        ratio = ours.median / empty.median
        yield Row(f"an empty task on each of {NODES} nodes", str(empty), "", True)
        yield Row("  an environment that is there, on each", f"{ours}, {ratio:.2f}x", "at most 2x", ratio <= 2)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(table(rows()))
