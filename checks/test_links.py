# SPDX-License-Identifier: Apache-2.0
"""Tests of the relative links in all Markdown files."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pages() -> list[Path]:
    """Return all Markdown files of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as the hosting site and the built documentation form them."""
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


def find_broken_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
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
    """Every relative link of every page leads to an existing file and heading."""
    assert len(pages()) > 14
    assert {str(page.relative_to(ROOT)): bad for page in pages() if (bad := find_broken_links(page))} == {}


def test_broken_links_are_found(tmp_path):
    """A link to a missing file or heading is found; a link in code is ignored."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` & c\n## A b  c\n[1](#a-b--c) [2](#a-b--c-1) [3](#nowhere) [4](no.md) [5](page.md#a-b) `[6](x.md)`\n"
        "```\n# no heading\n[7](y.md)\n```\n[8](#no-heading) [9](https://example.org/#there)\n"
    )
    assert find_broken_links(page) == ["#nowhere", "no.md", "page.md#a-b", "#no-heading"]
