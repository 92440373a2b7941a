# SPDX-License-Identifier: Apache-2.0
"""The first page works."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_example(tmp_path):
    """The README's example, as a script of its own."""
    example = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "example.py"
    script.write_text(example.replace("init_ray(", 'init_ray(address="local", '))  # whatever else runs here
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[6.0, 10.0]"


def test_links():
    """Every relative link leads to a file."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("packages/*/README.md")]:
        targets = [part.split(")")[0] for part in page.read_text().split("](")[1:]]
        missing = [t for t in targets if "://" not in t and not (page.parent / t.split("#")[0]).exists()]
        assert missing == [], page
