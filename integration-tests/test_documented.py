# SPDX-License-Identifier: Apache-2.0
"""Tests that every public name and every public attribute is documented."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("packages/*/src/*/__init__.py"))
MODULES = [
    f"{folder.name}.{stem}".removesuffix(".__init__")
    for folder in FOLDERS
    for stem in ["__init__", *sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))]
]


@pytest.fixture
def exported(request):
    """Return the exported objects of a public module by name."""
    if request.param.endswith(".torch"):
        pytest.importorskip("torch", reason="the torch helpers need torch")
    if request.param.endswith(".otel"):
        pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry exporter needs the SDK")
    module = importlib.import_module(request.param)
    return {name: getattr(module, name) for name in module.__all__ if name != "__version__"}


each_module = pytest.mark.parametrize("exported", MODULES, indirect=True)


def classes(exported):
    return [one for one in exported.values() if inspect.isclass(one)]


def own_bases(owner):
    return [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted(name):
    """`__all__` lists each exported name once, in alphabetical order."""
    listed = re.search(r"^__all__ = \[(.*?)\]", source(name), re.MULTILINE | re.DOTALL)[1]
    names = re.findall(r'"(\w+)"', listed)
    assert names == sorted(set(names))


def source(name):
    package, _, module = name.partition(".")
    (folder,) = [folder for folder in FOLDERS if folder.name == package]
    return (folder / f"{module or '__init__'}.py").read_text(encoding="utf-8")


@each_module
def test_members(exported):
    """Each public name, method and property has a docstring."""
    members = {name: one for name, one in exported.items() if getattr(one, "__module__", "").startswith("fairlead")}
    for owner in classes(members):
        for name, member in inspect.getmembers(owner):
            ours = getattr(member, "__module__", None) or "fairlead"  # A property has no __module__.
            if name.startswith("_") or not ours.startswith("fairlead"):
                continue
            if inspect.isfunction(member) or isinstance(member, property):
                members[f"{owner.__name__}.{name}"] = member
    assert [name for name, member in members.items() if not inspect.getdoc(member)] == []


@each_module
def test_attributes(exported):
    """Each public attribute is described as `name: description` in its class, a base class or a class they refer to."""
    assert {owner.__name__: names for owner in classes(exported) if (names := find_undescribed(owner))} == {}


def find_undescribed(owner):
    package = importlib.import_module(owner.__module__.partition(".")[0])
    # The docstring that a dataclass generates does not count as a description.
    docs = [base.__doc__ for base in own_bases(owner) if not (base.__doc__ or "").startswith(f"{base.__name__}(")]
    text = "\n".join(doc or "" for doc in docs)
    references = [getattr(package, name, None) for name in re.findall(r"`(\w+)`", text)]
    text = "\n".join([text, *(inspect.getdoc(other) or "" for other in references if other is not None)])
    return [name for name in attributes(owner) if not re.search(rf"(?<![\w.]){name}(, \w+)*(:|`)", text)]


def attributes(owner):
    """Return the public attributes that a class annotates or that its methods set."""
    annotated = {name for base in own_bases(owner) for name in inspect.get_annotations(base)}
    stored = {
        name
        for base in own_bases(owner)
        for name in re.findall(r"^ +self\.(\w+).* = ", inspect.getsource(base), re.MULTILINE)
    }
    return sorted(name for name in annotated | stored if not name.startswith("_"))


class PartlyDescribed:
    """Describe only one of two attributes.

    Attributes:
        described: an attribute with a description.
    """

    __module__ = "fairlead_sharding"
    described: int
    missing: int


def test_missing_description_is_found(monkeypatch):
    """An attribute without a description is found."""
    monkeypatch.setattr(inspect, "getsource", lambda owner: "")  # Its module does not contain the class.
    assert find_undescribed(PartlyDescribed) == ["missing"]
