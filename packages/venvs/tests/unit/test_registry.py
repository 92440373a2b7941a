# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker class, from code and from a pyproject."""

import sys

import pytest

from fairlead_venvs import (
    VenvSpec,
    actor_environments,
    get_actor_python_env,
    known_actor_environments,
    register_actor_env,
)


@pytest.fixture(autouse=True)
def empty():
    """Start and end with an empty registry."""
    actor_environments.clear()
    yield
    actor_environments.clear()


def test_unknown():
    """The error names the class, what is known, and every way to give one."""
    register_actor_env("a.B", "uv run")
    with pytest.raises(ValueError, match=r"'a.C' \(known are: a.B\)") as caught:
        get_actor_python_env("a.C")
    for way in ("register_actor_env('a.C', ...)", "[tool.fairlead.actor-environments]", "python= of the worker group"):
        assert way in str(caught.value)


def test_pyproject(tmp_path, monkeypatch):
    """A pyproject above the current folder has words, commands and tables, with paths relative to its folder."""
    (tmp_path / "pyproject.toml").write_text(
        """
        [tool.fairlead.actor-environments]
        "a.System" = "system"
        "a.Path" = "envs/x/bin/python"
        "a.Command" = "uv run --locked --extra vllm --directory sub"
        "a.Here" = "uv run --locked"
        "a.Loose" = "uv run --no-project --with delta"
        "a.Table" = { requirements = ["delta", "ray"], find_links = ["."] }
        "a.Project" = { project = "sub", extras = ["vllm"] }
        "a.Both" = { command = "uv run", python = "3.11" }
        """
    )
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "pyproject.toml").write_text("[tool.other]\n")
    monkeypatch.chdir(tmp_path / "below")
    register_actor_env("a.Here", "registered")
    found = known_actor_environments()

    assert found["a.System"] == sys.executable
    assert found["a.Path"] == str(tmp_path / "envs/x/bin/python")
    sub = VenvSpec(project=tmp_path / "sub", extras=["vllm"], default_groups=True)
    assert get_actor_python_env("a.Command") == found["a.Command"] == sub
    assert found["a.Here"] == "registered"
    actor_environments.clear()
    assert get_actor_python_env("a.Here") == VenvSpec(project=tmp_path, default_groups=True)
    assert found["a.Loose"] == VenvSpec(requirements=["delta"])
    assert found["a.Table"] == VenvSpec(requirements=["delta", "ray"], find_links=[str(tmp_path)])
    assert found["a.Project"] == VenvSpec(project=tmp_path / "sub", extras=["vllm"])
    assert found["a.Both"] == VenvSpec(project=tmp_path, default_groups=True, python="3.11")


@pytest.mark.parametrize("entry", ["3", '""', '{ requirement = ["x"] }', '"uv run --isolated"', "{ }"])
def test_pyproject_that_cannot_be_read(tmp_path, monkeypatch, entry):
    """The error of a wrong entry names its file and its class."""
    (tmp_path / "pyproject.toml").write_text(f'[tool.fairlead.actor-environments]\n"a.B" = {entry}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"actor-environments\] in .*pyproject.toml, a.B: "):
        get_actor_python_env("a.B")
    (tmp_path / "pyproject.toml").write_text("[tool")
    with pytest.raises(ValueError, match="cannot be read"):
        get_actor_python_env("a.B")
