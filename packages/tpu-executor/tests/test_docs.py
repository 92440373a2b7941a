# SPDX-License-Identifier: Apache-2.0
"""Every example that a reader sees is run."""

import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_tpu_executor
from fairlead_tpu_executor.testing import PretendSlices

PACKAGE = Path(fairlead_tpu_executor.__file__).parent
README = Path(__file__).parent.parent / "README.md"
SOURCES = sorted(path for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_examples_in_docstrings(source):
    """The examples show what the code does."""
    module = importlib.import_module(f"fairlead_tpu_executor.{source.stem}")
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted == len(re.findall(r"^\s*>>> ", source.read_text(), flags=re.MULTILINE))


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


EXPORTED = [getattr(fairlead_tpu_executor, name) for name in fairlead_tpu_executor.__all__]
EXPORTED = [one for one in [*EXPORTED, PretendSlices] if getattr(one, "__module__", "").startswith("fairlead")]
CLASSES = [one for one in EXPORTED if inspect.isclass(one)]


def public_members():
    owners = EXPORTED
    members = {
        f"{owner.__name__}.{name}": member
        for owner in CLASSES
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    members |= {owner.__name__: owner for owner in owners}
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
    referred = [getattr(fairlead_tpu_executor, name, None) for name in re.findall(r"`(\w+)`", said)]
    said = "\n".join([said, *(inspect.getdoc(other) for other in referred if other is not None)])
    names = public_attributes(owner)
    assert [name for name in names if not re.search(rf"(?<![\w.]){name}(, \w+)*(:|`)", said)] == []


def test_all_is_sorted_and_complete():
    """What is exported is listed, in order."""
    exported = fairlead_tpu_executor.__all__
    assert exported == sorted(exported)
    assert all(hasattr(fairlead_tpu_executor, name) for name in exported)


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
