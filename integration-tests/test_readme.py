# SPDX-License-Identifier: Apache-2.0
"""The first page works."""

import re
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


def pages() -> list[Path]:
    """All Markdown files of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be reached by: as on its site, so in the built documentation."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.M), re.M)
    found: set[str] = set()
    for heading in headings:
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    bad = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            bad.append(target)
    return bad


def test_links():
    """Every relative link of every page leads to a file, and to a heading in it."""
    assert len(pages()) > 14
    assert {str(page.relative_to(ROOT)): bad for page in pages() if (bad := broken(page))} == {}


def test_broken_links_are_found(tmp_path):
    """A link to no file, or to no heading, is told; one in code is no link."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` & c\n## A b  c\n[1](#a-b--c) [2](#a-b--c-1) [3](#nowhere) [4](no.md) [5](page.md#a-b) `[6](x.md)`\n"
        "```\n# no heading\n[7](y.md)\n```\n[8](#no-heading) [9](https://example.org/#there)\n"
    )
    assert broken(page) == ["#nowhere", "no.md", "page.md#a-b", "#no-heading"]
