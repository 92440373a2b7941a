# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark results, and of the figures that README.md quotes from them."""

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


def test_quoted_figures():
    """Each figure of "What it costs" is in the row of RESULTS.md with the same name and the same baseline."""
    measured = {}
    for what, figure, *_ in _rows((ROOT / "benchmarks" / "RESULTS.md").read_text()):
        if not what.startswith("   "):
            baseline = what.strip()
        measured[baseline, what.strip()] = figure

    _, *quoted = _rows((ROOT / "README.md").read_text().split("## What it costs")[1].split("\n## ")[0])
    assert len(quoted) >= 5
    for row in quoted:
        baseline, what, quote = (cell.strip() for cell in row)
        figure = re.match(FIGURE, quote)
        assert figure, row
        found = re.findall(FIGURE, measured[baseline, what])
        assert figure.group() in found, (
            f"{baseline}, {what}: README.md says {quote!r}, RESULTS.md {measured[baseline, what]!r}"
        )


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
