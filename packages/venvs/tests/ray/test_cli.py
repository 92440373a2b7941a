# SPDX-License-Identifier: Apache-2.0
"""`prefetch` on the command line, on this machine and on a cluster."""

import pytest

PYPROJECT = """
[tool.fairlead.actor-environments]
"a.One" = {{ requirements = ["alpha"], find_links = ["{wheels}"], no_index = true }}
"a.Same" = "uv run --no-project --with alpha --no-index --find-links {wheels}"
"a.Other" = {{ requirements = ["beta"], find_links = ["{wheels}"], no_index = true }}
"a.Plain" = "system"
"a.Wrong" = {{ requirements = ["alpha==9"], find_links = ["{wheels}"], no_index = true }}
"a.Nowhere" = {{ project = "nowhere" }}
"""


@pytest.mark.parametrize("address", [[], ["--address", "local"]], ids=["machine", "cluster"])
def test_prefetch(run, tmp_path, wheels, address):
    """Equal content of several classes is built once, and a failure does not stop the others."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format(wheels=wheels))
    said = run("prefetch", *address, code=1)
    rows = [line.split("│") for line in said.splitlines() if line.startswith("│ a.")]
    lines = {row[1].strip(): row[2].strip() for row in rows}
    expected = ["reused", "failed", "built", "built", "skipped", "failed"]
    assert [lines[f"a.{name}"] for name in ("Same", "Nowhere", "One", "Other", "Plain", "Wrong")] == expected
    assert "2 built, 1 reused, 1 skipped, 2 failed" in said
    assert "there is no version of alpha==9" in said
    assert "no pyproject.toml in" in said
    if not address:
        assert "0 built, 2 reused, 0 skipped, 0 failed" in run("prefetch", "a.One", "a.Same")
        assert "0 built, 0 reused, 0 skipped, 1 failed" in run("prefetch", "a.Unknown", code=1)
