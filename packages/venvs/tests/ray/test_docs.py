# SPDX-License-Identifier: Apache-2.0
"""The example of the README runs."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_readme(tools, wheels, tmp_path, monkeypatch):
    """The examples of the README run, and print what it shows; wheels made here stand for the packages."""
    text = README.read_text(encoding="utf-8")
    folder = tmp_path / "wheels"
    folder.mkdir()
    import ray

    tools.ray_wheel(folder, ray.__version__)
    tools.make_wheel(folder, "numpy", "2.0")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert re.sub(r"\S*/(\w+)-[0-9a-f]{12}", r"\1-ID", done.stdout) == re.sub(r"\S*/(\w+)-\w{12}", r"\1-ID", shown)
