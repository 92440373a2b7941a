# SPDX-License-Identifier: Apache-2.0
"""The README's example, as users run it."""

from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_example(run_python):
    """The example of the README works as a script, and its calls go by the lane."""
    _, block = README.read_text(encoding="utf-8").split("```python\n")
    example = block.split("```")[0]
    assert "lane" in run_python(example, RAY_ADDRESS="local")
