# SPDX-License-Identifier: Apache-2.0
"""The README names everything that is exported."""

from pathlib import Path

import fairlead_venvs

README = Path(__file__).parents[2] / "README.md"


def test_readme_has_all_names():
    """The README names every export."""
    text = README.read_text(encoding="utf-8")
    assert all(f"`{name}" in text for name in fairlead_venvs.__all__ if not name.startswith("Worker"))
