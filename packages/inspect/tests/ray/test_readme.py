# SPDX-License-Identifier: Apache-2.0
"""The README's example, as users run it."""

import os
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_example(tmp_path):
    """The example of the README works as a script: it names the actor that hangs, and where."""
    script = tmp_path / "example.py"
    _, block = README.read_text(encoding="utf-8").split("```python\n")
    script.write_text(block.split("```")[0])
    env = {**os.environ, "RAY_ADDRESS": "local"}  # whatever else runs here
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "HANGS" in done.stdout
    assert "Trainer trainer on " in done.stdout
    assert "example.py:12 Trainer.train  ->  Queue.get" in done.stdout
    assert "Controller  ->  Trainer trainer" in done.stdout
