# SPDX-License-Identifier: Apache-2.0
"""Every example that a reader sees is run."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_tpu_executor

PACKAGE = Path(fairlead_tpu_executor.__file__).parent
README = Path(__file__).parent.parent / "README.md"
# The module of each file, by its name.
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if not path.stem.startswith("__")
}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_examples_in_docstrings(name):
    """The examples show what the code does."""
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted == len(re.findall(r"^\s*>>> ", SOURCES[name].read_text(), flags=re.MULTILINE))


def test_the_first_example():
    """That of the package starts a Ray, and runs in a process of its own."""
    code = """if True:
        import doctest, fairlead_tpu_executor
        results = doctest.testmod(fairlead_tpu_executor)
        assert results.attempted and not results.failed, results
    """
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme(tmp_path):
    """The example of the README runs as a script, and prints what the README shows."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    example = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)[0]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown
