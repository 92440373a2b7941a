# SPDX-License-Identifier: Apache-2.0
"""The package as users meet it: its import, and the examples in docstrings and the README."""

import doctest
import importlib
import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_workergroup

NAMES = [module.name for module in pkgutil.walk_packages(fairlead_workergroup.__path__, "fairlead_workergroup.")]
MODULES = sorted(name.removeprefix("fairlead_workergroup.") for name in NAMES)

# What modules for an extra need.
NEEDS = {"torch": "torch"}


def test_import_starts_nothing():
    """Importing does not start Ray, and loads no torch."""
    code = "import sys, fairlead_workergroup, ray; sys.exit(ray.is_initialized() or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["", *MODULES])
def test_examples(name):
    """The examples in docstrings work."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="the module is for an extra")
    module = importlib.import_module(f"fairlead_workergroup.{name}".rstrip("."))
    assert doctest.testmod(module).failed == 0


def test_readme(tmp_path):
    """The README's example works as a script, and prints what its comment says."""
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    env = {**os.environ, "RAY_ADDRESS": "local"}  # whatever else runs here
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1.5, 3.5]", *(f"{rank} idle" for rank in range(4))]
