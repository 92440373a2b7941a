# SPDX-License-Identifier: Apache-2.0
"""Tests of the whole package: its examples, and what its modules import."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_inspect

FOLDER = Path(fairlead_inspect.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
# What code that is shipped by value may import, besides itself.
SHIPPED = {*sys.stdlib_module_names, "ray"}


def test_import_is_light():
    """The import starts no Ray, and does not load the command line."""
    code = (
        "import sys, fairlead_inspect, ray; "
        "sys.exit(ray.is_initialized() or 'fairlead_inspect._command' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "module", [one for one in MODULES if one.parent.name == "_node"], ids=lambda module: module.name
)
def test_modules_of_workers(module):
    """A module that runs in workers imports the standard library and Ray, at its top, and its siblings by name."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert all(node in tree.body for node in imports)
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.module
            continue
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        assert {name.partition(".")[0] for name in names} <= SHIPPED


def test_examples_in_docstrings(monkeypatch):
    """The examples in docstrings print what they show."""
    monkeypatch.setenv("FAIRLEAD_INSPECT_LABEL", "")  # which one of them sets
    attempted = 0
    for source in MODULES:
        parts = source.relative_to(FOLDER).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        name = ".".join(["fairlead_inspect", *(part for part in parts if part != "__init__")])
        results = doctest.testmod(importlib.import_module(name))
        assert results.failed == 0, source.name
        attempted += results.attempted
    assert attempted > 2


def test_alone():
    """Without fairlead-workergroup all commands are there, and neither numpy nor torch is loaded."""
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *of: None if name.startswith('fairlead_w') else find(name, *of); "
        "import fairlead_inspect; heavy = {'numpy', 'torch'} & {*sys.modules}; "
        "from fairlead_inspect._command import main; status = main(['ps', '--here', '--window', '0']); "
        "sys.exit(status or bool({'fairlead_workergroup', 'fairlead_sharding'} & {*sys.modules}) or bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, stdout=subprocess.DEVNULL).returncode == 0
