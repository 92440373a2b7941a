# SPDX-License-Identifier: Apache-2.0
"""Every public name says what it is, every public attribute too."""

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
    """What a public module exports, by name."""
    if request.param.endswith(".torch"):
        pytest.importorskip("torch", reason="the torch helpers need torch")
    module = importlib.import_module(request.param)
    return {name: getattr(module, name) for name in module.__all__ if name != "__version__"}


each_module = pytest.mark.parametrize("exported", MODULES, indirect=True)


def classes(exported):
    return [one for one in exported.values() if inspect.isclass(one)]


def own_bases(owner):
    return [base for base in owner.__mro__ if base.__module__.startswith("fairlead")]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted(name):
    """What is exported is listed once, in order."""
    listed = re.search(r"^__all__ = \[(.*?)\]", source(name), re.MULTILINE | re.DOTALL)[1]
    names = re.findall(r'"(\w+)"', listed)
    assert names == sorted(set(names))


def source(name):
    package, _, module = name.partition(".")
    (folder,) = [folder for folder in FOLDERS if folder.name == package]
    return (folder / f"{module or '__init__'}.py").read_text(encoding="utf-8")


@each_module
def test_members(exported):
    """Each public name, method and property says what it is for."""
    members = {name: one for name, one in exported.items() if getattr(one, "__module__", "").startswith("fairlead")}
    for owner in classes(members):
        for name, member in inspect.getmembers(owner):
            ours = getattr(member, "__module__", None) or "fairlead"  # a property has none
            if name.startswith("_") or not ours.startswith("fairlead"):
                continue
            if inspect.isfunction(member) or isinstance(member, property):
                members[f"{owner.__name__}.{name}"] = member
    assert [name for name, member in members.items() if not inspect.getdoc(member)] == []


@each_module
def test_attributes(exported):
    """A class, a base of it, or what these refer to says of each attribute what it is: `name: what`."""
    assert {owner.__name__: names for owner in classes(exported) if (names := undescribed(owner))} == {}


def undescribed(owner):
    package = importlib.import_module(owner.__module__.partition(".")[0])
    # What a dataclass says of itself when nobody else does is no description.
    docs = [base.__doc__ for base in own_bases(owner) if not (base.__doc__ or "").startswith(f"{base.__name__}(")]
    said = "\n".join(doc or "" for doc in docs)
    referred = [getattr(package, name, None) for name in re.findall(r"`(\w+)`", said)]
    said = "\n".join([said, *(inspect.getdoc(other) or "" for other in referred if other is not None)])
    return [name for name in attributes(owner) if not re.search(rf"(?<![\w.]){name}(, \w+)*(:|`)", said)]


def attributes(owner):
    """What a class annotates, and what its methods set."""
    annotated = {name for base in own_bases(owner) for name in inspect.get_annotations(base)}
    stored = {
        name
        for base in own_bases(owner)
        for name in re.findall(r"^ +self\.(\w+).* = ", inspect.getsource(base), re.MULTILINE)
    }
    return sorted(name for name in annotated | stored if not name.startswith("_"))


class Undescribed:
    """Tells of one of its attributes only.

    Attributes:
        told: what is told.
    """

    __module__ = "fairlead_sharding"
    told: int
    kept_back: int


def test_what_is_missing_is_found(monkeypatch):
    """The test of attributes can fail."""
    monkeypatch.setattr(inspect, "getsource", lambda owner: "")  # a module that does not hold it
    assert undescribed(Undescribed) == ["kept_back"]
