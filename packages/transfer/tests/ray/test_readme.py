# SPDX-License-Identifier: Apache-2.0
"""The README's example, as users run it."""

import os
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_example(tmp_path):
    """The first example of the README works as a script, and shows what was sent."""
    script = tmp_path / "example.py"
    _, block = README.read_text(encoding="utf-8").split("```python\n")
    example = block.split("```")[0]
    script.write_text(example)
    env = {**os.environ, "RAY_ADDRESS": "local"}  # whatever else runs here
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "version 3: 48 bytes moved" in done.stdout
    assert "{0: 3}" in done.stdout
