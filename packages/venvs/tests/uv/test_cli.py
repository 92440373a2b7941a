# SPDX-License-Identifier: Apache-2.0
"""The command line, as it is typed."""

import pytest

from fairlead_venvs import VenvSpec, create_local_venv


@pytest.mark.smoke
def test_build_list_prune(run, root, wheels, monkeypatch):
    """Environments are built, listed and pruned, and standard output has only the results."""
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_OFFLINE", "1")
    python = run("build", "-r", "alpha", "-r", "beta").strip()
    assert python == create_local_venv(VenvSpec(requirements=["alpha", "beta"]))
    named = run("build", "uv run --no-project --with alpha", "--name", "mine", "--force").strip()
    assert "/mine-" in named
    listed = run("list")
    assert "alpha, beta" in listed
    assert f"2 in {root}" in listed
    assert f"0 removed from {root}" in run("prune")
    assert f"1 removed from {root}" in run("prune", "--older-than", "0", "--keep", named.split("/")[-3])
    assert "1 in " in run("list")


def test_errors(run, monkeypatch):
    """Misuse prints one line and has another exit status than a failed build, which prints uv's output."""
    assert "exactly one of" in run("build", code=2)
    monkeypatch.setenv("UV_OFFLINE", "1")
    said = run("build", "-r", "alpha==9", code=1)
    assert "$ " in said
    assert "alpha==9" in said
    assert "Traceback" not in said
