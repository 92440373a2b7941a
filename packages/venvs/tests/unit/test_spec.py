# SPDX-License-Identifier: Apache-2.0
"""Specs: the forms of a request, and those that are refused before any process is started."""

import pickle
from pathlib import Path

import pytest

from fairlead_venvs import VenvSpec, create_local_venv


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


@pytest.mark.parametrize(
    "command",
    [
        "uv run --isolated",
        "uv run --locked=yes",
        "uv run python train.py",
        "uv run -m train",
        "uv run --with numpy",
        "uv run --no-project --extra vllm",
        "uv run --extra",
        "uv sync --locked",
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
    ({"command": "uv run", "extras": ["x"]}, "belong to project=, or into the command"),
    ({"requirements": [], "extras": ["x"]}, "belong to project="),
    ({"requirements": ["-r other.txt"]}, "Options such as -r and -e"),
    ({"requirements": ["./folder"]}, "is not a requirement"),
    ({"requirements": [], "python": ">=3.11"}, "must be a version"),
    ({"requirements": [], "env": {"VIRTUAL_ENV": "/x"}}, "may not set VIRTUAL_ENV"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(fields, said):
    """A request that is contradictory or cannot be built is a ValueError."""
    with pytest.raises(ValueError, match=said):
        VenvSpec(**fields)


@pytest.mark.parametrize("fields", [{"requirements": "numpy"}, {"requirements": [], "env": {"A": 1}}])
def test_types(fields):
    """One string in the place of a sequence is a TypeError."""
    with pytest.raises(TypeError):
        VenvSpec(**fields)


def test_projects_that_cannot_be_read(tmp_path, make_project):
    """A missing project or lock is reported before any process is started."""
    with pytest.raises(ValueError, match=r"no pyproject.toml in"):
        create_local_venv(VenvSpec(project=tmp_path))
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
