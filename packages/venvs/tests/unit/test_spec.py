# SPDX-License-Identifier: Apache-2.0
"""Specs: the forms of a request, and those that are refused before any process is started."""

import pickle
import sys
from pathlib import Path

import pytest

from fairlead_venvs import PY_EXECUTABLES, VenvSpec, create_local_venv


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("", {}),
        ("--locked", {}),
        ("--frozen", {"frozen": True}),
        ("--locked --extra vllm", {"extras": ["vllm"]}),
        ("--extra=b --extra a", {"extras": ["a", "b"]}),
        ("--group test", {"groups": ["test"]}),
        ("--python 3.12", {"python": "3.12"}),
    ],
)
def test_commands(flags, fields, tmp_path, monkeypatch):
    """A command means the spec of a project, with the groups that uv installs by default."""
    spec = VenvSpec(**{"project": tmp_path, "default_groups": True, **fields})
    assert VenvSpec(command=f"uv run --directory {tmp_path} {flags}") == spec
    assert VenvSpec(command=f"uv run {flags} --project={tmp_path}") == spec
    monkeypatch.chdir(tmp_path)
    assert VenvSpec(command=f"uv run {flags}") == spec
    assert hash(VenvSpec(command=f"uv run {flags}")) == hash(spec)


def test_command_without_project():
    """A command without a project means requirements."""
    command = "/opt/bin/uv run --no-project --with numpy,Ray --with 'packaging >= 24'"
    assert VenvSpec(command=command) == VenvSpec(requirements=["ray", "numpy", "packaging>=24"])


def test_commands_for_registries(tmp_path, monkeypatch):
    """The predefined commands mean the project in the current folder."""
    monkeypatch.chdir(tmp_path)
    assert VenvSpec(command=PY_EXECUTABLES.BASE) == VenvSpec(project=tmp_path, default_groups=True)
    assert VenvSpec(command=PY_EXECUTABLES.VLLM).extras == ("vllm",)
    assert sys.executable == PY_EXECUTABLES.SYSTEM


@pytest.mark.parametrize(
    "command",
    [
        "uv run --isolated",
        "uv run --no-sync",
        "uv run --locked=yes",
        "uv run python train.py",
        "uv run -m train",
        "uv run --with numpy",
        "uv run --no-project --extra vllm",
        "uv run --extra",
        "uv sync --locked",
        "uvx ruff",
        "python",
        "",
    ],
)
def test_commands_that_cannot_be_read(command):
    """A command with an unsupported flag is refused, and the error lists the supported ones."""
    with pytest.raises(ValueError, match=r"--locked|needs a value|starts with 'uv run'|--with|--no-project"):
        VenvSpec(command=command)


REFUSED = [
    ({}, "exactly one of"),
    ({"requirements": [], "project": "."}, "exactly one of"),
    ({"command": "uv run", "project": "."}, "exactly one of"),
    ({"command": "uv run", "extras": ["x"]}, "put it into the command"),
    ({"requirements": [], "extras": ["x"]}, "belong to a project"),
    ({"requirements": ["-r other.txt"]}, "Options such as -r and -e"),
    ({"requirements": ["-e ."]}, "Options such as -r and -e"),
    ({"requirements": ["./folder"]}, "is not a requirement"),
    ({"requirements": ["pkg @ file:///tmp/pkg"]}, "names a path of this machine"),
    ({"requirements": ["/nowhere/pkg-1.0-py3-none-any.whl"]}, "there is no wheel"),
    ({"requirements": [], "python": ">=3.11"}, "must be a version"),
    ({"requirements": [], "index": "pypi"}, "must be a URL"),
    ({"requirements": [], "index": "https://host", "no_index": True}, "contradict"),
    ({"requirements": [], "find_links": ["/a,b"]}, "comma"),
    ({"requirements": [], "env": {"VIRTUAL_ENV": "/x"}}, "may not set VIRTUAL_ENV"),
    ({"requirements": [], "setup": [""]}, "must start with a program"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(fields, said):
    """A request that is contradictory or cannot be built is a ValueError."""
    with pytest.raises(ValueError, match=said):
        VenvSpec(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"requirements": "numpy"},
        {"requirements": [1]},
        {"requirements": [], "setup": "echo"},
        {"requirements": [], "env": {"A": 1}},
        {"requirements": [], "env": ["A"]},
        {"project": ".", "extras": "vllm"},
    ],
)
def test_types(fields):
    """One string in the place of a sequence is a TypeError."""
    with pytest.raises(TypeError):
        VenvSpec(**fields)


def test_what_is_no_spec():
    """An interpreter or a number is not an environment that can be built."""
    with pytest.raises(ValueError, match="expected a VenvSpec or a command"):
        create_local_venv("/usr/bin/python3")
    with pytest.raises(TypeError, match="expected a VenvSpec or a command"):
        create_local_venv(3)


def test_projects_that_cannot_be_read(tmp_path, make_project):
    """A missing project, lock or folder is reported before any process is started."""
    with pytest.raises(ValueError, match=r"no pyproject.toml in"):
        create_local_venv(VenvSpec(project=tmp_path))
    with pytest.raises(ValueError, match="no folder"):
        create_local_venv(VenvSpec(requirements=[], find_links=[str(tmp_path / "nowhere")]))
    folder = make_project(lock=False)
    with pytest.raises(ValueError, match="run `uv lock` there"):
        create_local_venv(VenvSpec(project=folder))


def test_a_spec_travels_and_shows_itself(tmp_path, monkeypatch):
    """A spec is a value: it can be pickled, its repr evaluates to it, and its paths are absolute."""
    monkeypatch.chdir(tmp_path)
    spec = VenvSpec(project="sub", extras=["b", "a", "a"], python="3.11", find_links=["wheels"], env={"A": "1"})
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert eval(repr(spec)) == spec
    assert spec.project == str(Path(tmp_path, "sub"))
    assert spec.find_links == (str(tmp_path / "wheels"),)
    assert spec.extras == ("a", "b")
