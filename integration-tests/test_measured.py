# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmarks and of the results that they write."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("ok", [True, False])
def test_missed_bounds(tmp_path, ok):
    """A row that misses its bound fails the run and is named, after the results of all packages are written."""
    for file in ("run.py", "_measure.py"):
        shutil.copy(ROOT / "benchmarks" / file, tmp_path)
    for module in re.findall(r"^import (bench_\w+)$", (tmp_path / "run.py").read_text(), re.MULTILINE):
        row = f'Row("  {module}", "2x", "<= 1x", {ok or module != "bench_batching"})'
        (tmp_path / f"{module}.py").write_text(f"from _measure import Row\ndef rows():\n    yield {row}\n")
    ran = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == (0 if ok else 1), ran.stderr
    assert ("batching: bench_batching: 2x, must reach <= 1x" in ran.stderr) is not ok
    assert "bench_sharding: 2x" not in ran.stderr
    assert "## fairlead-workergroup" in (tmp_path / "RESULTS.md").read_text()


def test_simulated_cluster(monkeypatch):
    """The benchmark of a simulated cluster runs, here with 32 workers, and its counts are within their bounds."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("bench_scale")
    monkeypatch.setattr(bench, "SIMULATED_NODES", 4)
    rows = {row.what.strip(): row for row in bench.simulated_rows()}
    for what in (
        "simulated: requests that wait for the head at a time",
        "simulated: a look at them: requests",
        "simulated: bytes there and back, per worker",
    ):
        assert rows[what].ok, rows[what]


def test_looks(monkeypatch):
    """The benchmark of looks runs, here at 4 actors on 2 raylets, and each look blames the planted rank."""
    folder = str(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(folder)
    # Workers import the class of the actors, and do not have the path of this process.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]))
    bench = importlib.import_module("bench_inspect")
    for name, value in {"NODES": 2, "PER_NODE": 2, "LATE": 1, "ROUNDS": 2, "MORE_LOOKS": 1}.items():
        monkeypatch.setattr(bench, name, value)
    *_, peak, complete = bench.look_rows()
    assert complete.measured == "4 of 4"
    assert complete.ok
    assert peak.ok, peak
