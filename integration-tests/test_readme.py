# SPDX-License-Identifier: Apache-2.0
"""Tests of the example in README.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.smoke
def test_example(tmp_path):
    """The example of README.md runs as a script, and prints what its last comment says."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    env = {**os.environ, "RAY_ADDRESS": "local"}  # Ignore other clusters.
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == example.rpartition("  # ")[2].strip()
    assert "2*3= ..." in done.stdout
    assert example.count("import") == 1
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
