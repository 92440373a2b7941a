# SPDX-License-Identifier: Apache-2.0
"""Every example that a reader sees is run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import fairlead_placement
from fairlead_placement import testing

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


def public_members():
    owners = [getattr(fairlead_placement, name) for name in fairlead_placement.__all__]
    members = {
        f"{owner.__name__}.{name}": member
        for owner in owners
        if inspect.isclass(owner) and not issubclass(owner, Exception)
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    members |= {owner.__name__: owner for owner in [*owners, testing.assert_no_leaks]}
    return [pytest.param(member, id=name) for name, member in members.items()]


@pytest.mark.parametrize("member", public_members())
def test_public_members_are_documented(member):
    """Each public member says what it is for."""
    assert inspect.getdoc(member)


def test_all_is_sorted_and_complete():
    """What is exported is listed, in order."""
    assert fairlead_placement.__all__ == sorted(fairlead_placement.__all__)
    assert all(hasattr(fairlead_placement, name) for name in fairlead_placement.__all__)


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
