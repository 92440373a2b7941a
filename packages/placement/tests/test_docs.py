# SPDX-License-Identifier: Apache-2.0
"""Every example that a reader sees is run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import fairlead_placement

SOURCES = sorted(Path(fairlead_placement.__file__).parent.glob("*.py"))
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_examples_in_docstrings(source, monkeypatch):
    """The examples show what the code does. (Some start a Ray, so no fixture here does.)"""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    name = fairlead_placement.__name__ + ("" if source.stem == "__init__" else f".{source.stem}")
    module = importlib.import_module(name)
    results = doctest.testmod(
        module,
        extraglobs={
            one: getattr(fairlead_placement, one) for one in module.__all__ if hasattr(fairlead_placement, one)
        },
    )
    assert results.failed == 0
    assert results.attempted == Path(source).read_text().count("    >>> ") + Path(source).read_text().count("\n>>> ")


def without_ids(text):
    """Addresses and node ids differ, and with them the widths of columns."""
    text = re.sub(r"[\d.]+ \([0-9a-f]{6}\)", "ADDRESS (ID)", text)
    return re.sub(r" +", " ", re.sub(r"─+", "─", text)).strip()


def test_readme(run_script):
    """The example of the README runs as a script, and prints what the README shows."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown, refusal = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    # A Ray of its own, whatever runs on this machine.
    assert without_ids(run_script(example, RAY_ADDRESS="local")) == without_ids(shown)
    assert refusal.startswith(fairlead_placement.PlacementTimeoutError.__name__)
