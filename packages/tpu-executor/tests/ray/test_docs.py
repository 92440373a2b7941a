# SPDX-License-Identifier: Apache-2.0
"""The examples of the README and of the package start a Ray, and run in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def run(code, **options):
    """Run a program without the address of a cluster, and return what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_example():
    """The example of the package runs."""
    run("""if True:
        import doctest, fairlead_tpu_executor
        results = doctest.testmod(fairlead_tpu_executor)
        assert results.attempted and not results.failed, results
    """)


def test_readme(tmp_path):
    """The example of the README runs as a script, and prints what the README shows."""
    text = README.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)[0]
    assert run(example, cwd=tmp_path) == shown
