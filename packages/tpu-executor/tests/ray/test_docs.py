# SPDX-License-Identifier: Apache-2.0
"""The example of the README starts a Ray, and runs in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_readme(tmp_path):
    """The example of the README runs as a script, and prints what the README shows."""
    text = README.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)[0]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
