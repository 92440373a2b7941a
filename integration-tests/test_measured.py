# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark results, and of the figures that README.md quotes from them."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A number with its unit, such as 1.09x or +3.8 ms.
FIGURE = r"\+?\d[\d,]*(?:\.\d+)? ?[a-z]+"


def _rows(table: str) -> list[list[str]]:
    """Return the cells of each line of a Markdown table. The indentation of the first cell is kept."""
    return [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]


# The rows of RESULTS.md, with their baseline, that the bullets of README.md quote, in this order.
QUOTED = [
    ("refuse what can never fit, message included", None),
    ("call without arguments to 8 workers, by hand", "by worker group, call"),
    ("32 MB to 8 workers that they keep, by value", "by worker group"),
    ("from SIGKILL of a worker to WorkerFailureError", None),
    ("from SIGKILL of a worker to WorkerFailureError", "and then to an answer of all, the rank started again"),
    ("`uv sync` that finds nothing to do", "an environment that is there"),
    (
        "512 MiB by hand, 4 to 4 ranks: gather on rank 0, one put, slices",
        "a link through shared memory, against the object store",
    ),
]


def test_quoted_figures():
    """Each bullet of README.md quotes figures, and each figure is in its row of RESULTS.md."""
    measured = {}
    for what, figure, *_ in _rows((ROOT / "benchmarks" / "RESULTS.md").read_text()):
        if not what.startswith("   "):
            baseline = what.strip()
        measured[baseline, what.strip()] = figure

    bullets = re.split(r"^- ", (ROOT / "README.md").read_text().split("\n## ")[0], flags=re.MULTILINE)[1:]
    bullets[-1] = bullets[-1].split("\n\n")[0]
    assert len(bullets) == 4
    # An amount, such as 32 MB, is not a figure that was measured.
    quoted = [re.findall(r"\d[\d.,]*(?:x| m?s)\b", bullet) for bullet in bullets]
    assert all(quoted)
    for (baseline, what), figure in zip(QUOTED, [one for each in quoted for one in each], strict=True):
        row = measured[baseline, what or baseline]
        assert figure in re.findall(FIGURE, row), f"{what or baseline}: README.md says {figure}, RESULTS.md {row!r}"


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
        "simulated: a look of the watch at them: requests",
        "simulated: bytes there and back, per worker",
    ):
        assert rows[what].ok, rows[what]
