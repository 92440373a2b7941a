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


EXPORTED = [getattr(fairlead_placement, name) for name in fairlead_placement.__all__]
CLASSES = [one for one in EXPORTED if inspect.isclass(one)]


def public_members():
    owners = EXPORTED
    members = {
        f"{owner.__name__}.{name}": member
        for owner in CLASSES
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    members |= {owner.__name__: owner for owner in [*owners, testing.assert_no_leaks]}
    return [pytest.param(member, id=name) for name, member in members.items()]


@pytest.mark.parametrize("member", public_members())
def test_public_members_are_documented(member):
    """Each public member says what it is for."""
    assert inspect.getdoc(member)


def public_attributes(owner):
    """What a class annotates, and what its methods set."""
    own = [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]
    annotated = {name for base in own for name in inspect.get_annotations(base)}
    stored = {
        name for base in own for name in re.findall(r"^ +self\.(\w+).* = ", inspect.getsource(base), re.MULTILINE)
    }
    return sorted(name for name in annotated | stored if not name.startswith("_"))


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_public_attributes_are_described(owner):
    """A class, a base of it, or what these refer to says of each attribute what it is: `name: what`."""
    bases = [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]
    said = "\n".join(
        base.__doc__ for base in bases if base.__doc__ and not base.__doc__.startswith(f"{base.__name__}(")
    )
    referred = [getattr(fairlead_placement, name, None) for name in re.findall(r"`(\w+)`", said)]
    said = "\n".join([said, *(inspect.getdoc(other) for other in referred if other is not None)])
    names = public_attributes(owner)
    assert [name for name in names if not re.search(rf"(?<![\w.]){name}(, \w+)*(:|`)", said)] == []


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
