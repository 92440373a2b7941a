# SPDX-License-Identifier: Apache-2.0
"""Every example that a reader sees is run."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_venvs

FOLDER = Path(fairlead_venvs.__file__).parent
# The module of each file, by its name.
SOURCES = {
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts): path
    for path in FOLDER.rglob("*.py")
    if path.stem != "__main__"
}
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_examples_in_docstrings(name):
    """The examples show what the code does."""
    results = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert results.failed == 0
    assert results.attempted == len(re.findall(r"^ *>>> ", SOURCES[name].read_text(), flags=re.MULTILINE))


def test_readme_has_all_names():
    """What is exported stands on the first page."""
    text = README.read_text(encoding="utf-8")
    assert all(f"`{name}" in text for name in fairlead_venvs.__all__ if not name.startswith("Worker"))


def test_readme(tools, wheels, tmp_path, monkeypatch):
    """The examples of the README run, and print what it shows; wheels made here stand for the packages."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    folder = tmp_path / "wheels"
    folder.mkdir()
    import ray

    tools.ray_wheel(folder, ray.__version__)
    tools.make_wheel(folder, "numpy", "2.0")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert re.sub(r"\S*/(\w+)-[0-9a-f]{12}", r"\1-ID", done.stdout) == re.sub(r"\S*/(\w+)-\w{12}", r"\1-ID", shown)
