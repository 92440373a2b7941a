# SPDX-License-Identifier: Apache-2.0
"""Every example that a reader sees is run."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_venvs

SOURCES = sorted(path for path in Path(fairlead_venvs.__file__).parent.glob("*.py") if path.stem != "__main__")
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_examples_in_docstrings(source):
    """The examples show what the code does."""
    name = fairlead_venvs.__name__ + ("" if source.stem == "__init__" else f".{source.stem}")
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted == len(re.findall(r"^ *>>> ", source.read_text(), flags=re.MULTILINE))


EXPORTED = [getattr(fairlead_venvs, name) for name in fairlead_venvs.__all__ if name != "actor_environments"]
CLASSES = [one for one in EXPORTED if inspect.isclass(one)]


def public_members():
    members = {
        f"{owner.__name__}.{name}": member
        for owner in CLASSES
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    members |= {owner.__name__: owner for owner in EXPORTED}
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
    referred = [getattr(fairlead_venvs, name, None) for name in re.findall(r"`(\w+)`", said)]
    said = "\n".join([said, *(inspect.getdoc(other) for other in referred if other is not None)])
    names = public_attributes(owner)
    assert [name for name in names if not re.search(rf"(?<![\w.]){name}(, \w+)*(:|`)", said)] == []


def test_all_is_sorted_and_complete():
    """What is exported is listed, in order."""
    assert fairlead_venvs.__all__ == sorted(fairlead_venvs.__all__)
    assert all(hasattr(fairlead_venvs, name) for name in fairlead_venvs.__all__)
    assert all(f"`{name}" in README.read_text() for name in fairlead_venvs.__all__ if not name.startswith("Worker"))


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
