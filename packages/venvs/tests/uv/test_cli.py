# SPDX-License-Identifier: Apache-2.0
"""The command line, as it is typed."""

import pytest

from fairlead_venvs import create_local_venv


@pytest.mark.smoke
def test_build_list_prune(run, spec_of, wheels, root):
    """Environments are built, listed and pruned, and standard output has only the results."""
    links = ["--find-links", str(wheels), "--no-index"]
    python = run("build", "-r", "alpha", "-r", "beta", *links).strip()
    assert python == create_local_venv(spec_of("alpha", "beta"))
    command = "uv run --no-project --with alpha"
    named = run("build", command, *links, "--name", "mine", "--force").strip()
    assert "/mine-" in named
    listed = run("list")
    assert "alpha, beta" in listed
    assert f"2 in {root}" in listed
    assert f"2 would be removed from {root}" in run("prune", "--older-than", "0s", "--dry-run")
    assert f"1 removed from {root}" in run("prune", "--older-than", "0s", "--keep", named.split("/")[-3])
    assert "1 in " in run("list")


def test_errors(run, wheels):
    """Misuse prints one line and has another exit status than a failed build, which prints uv's output."""
    assert "exactly one of" in run("build", code=2)
    assert "expected a time such as" in run("prune", "--older-than", "soon", code=2)
    said = run("build", "-r", "alpha==9", "--find-links", str(wheels), "--no-index", code=1)
    assert "there is no version of alpha==9" in said
    assert "Traceback" not in said
