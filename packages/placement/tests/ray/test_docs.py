# SPDX-License-Identifier: Apache-2.0
"""Every example in the documentation of this package is run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import fairlead_placement
import fairlead_placement.extension

FOLDER = Path(fairlead_placement.__file__).parent
# The module of each file, by its name.
SOURCES = {".".join(path.relative_to(FOLDER.parent).with_suffix("").parts): path for path in FOLDER.rglob("*.py")}
README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_examples_in_docstrings(name, monkeypatch):
    """The examples print what they show. (Some start a Ray, so no fixture here does.)"""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    module = importlib.import_module(name.removesuffix(".__init__"))
    public = {one: getattr(fairlead_placement, one) for one in fairlead_placement.__all__}
    spi = {one: getattr(fairlead_placement.extension, one) for one in fairlead_placement.extension.__all__}
    results = doctest.testmod(module, extraglobs={**public, **spi, **vars(module)})
    assert results.failed == 0
    text = SOURCES[name].read_text(encoding="utf-8")
    assert results.attempted == text.count("    >>> ") + text.count("\n>>> ")


@pytest.mark.smoke
def test_readme(run_script):
    """The example of the README runs as a script and prints what the README shows."""
    text = README.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (shown,) = re.findall(r"print\(.*\)  # (.*)\n", example)
    # Always a new Ray, even if one runs on this machine.
    assert run_script(example, RAY_ADDRESS="local").splitlines()[-1] == shown
