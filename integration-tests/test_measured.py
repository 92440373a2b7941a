# SPDX-License-Identifier: Apache-2.0
"""The figures on the first page are those that were measured."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# With its unit: 1.09x, +3.8 ms.
FIGURE = r"\+?\d[\d,]*(?:\.\d+)? ?[a-z]+"


def _rows(table: str) -> list[list[str]]:
    """The cells of each line of a table in Markdown; how far the first is indented is kept."""
    return [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]


def test_quoted_figures():
    """Each figure of "What it costs" stands in RESULTS.md, in the row of the same name below the row it is against."""
    measured = {}
    for what, figure, *_ in _rows((ROOT / "benchmarks" / "RESULTS.md").read_text()):
        if not what.startswith("   "):
            against = what.strip()
        measured[against, what.strip()] = figure

    _, *quoted = _rows((ROOT / "README.md").read_text().split("## What it costs")[1].split("\n## ")[0])
    assert len(quoted) >= 5
    for row in quoted:
        against, what, said = (cell.strip() for cell in row)
        figure = re.match(FIGURE, said)
        assert figure, row
        found = re.findall(FIGURE, measured[against, what])
        assert figure.group() in found, (
            f"{against}, {what}: README.md says {said!r}, RESULTS.md {measured[against, what]!r}"
        )


@pytest.mark.parametrize("ok", [True, False])
def test_missed_bounds(tmp_path, ok):
    """A row that misses its bound fails the run, by name, after the results of all packages are written."""
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
