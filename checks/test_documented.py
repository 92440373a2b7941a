# SPDX-License-Identifier: Apache-2.0
"""Tests that public names, errors and environment variables are on the pages where users look for them.

They read the sources, and import no package. `docs/test_prose.py` checks that each public name has a docstring.
"""

import ast
import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("packages/*/src/*/__init__.py"))


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def read_exports(folder: Path) -> set[str]:
    """Return the names in the `__all__` of a package."""
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value)) - {"__version__"}
    raise AssertionError(f"{folder.name} has no __all__")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_reference(folder):
    """The reference has an entry for each public name of a package."""
    name = folder.parents[1].name
    pages = [ROOT / f"docs/reference/{name}.md", *(ROOT / f"docs/reference/{name}").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    entries = re.findall(rf":: (?:{folder.name}\.)?(\w+)$", text, re.MULTILINE)
    assert read_exports(folder) - {*entries} == set()


def test_docstrings_are_linked():
    """A page of the reference that shows docstrings alone links the files that have them, for readers of the text."""
    pages = [*(ROOT / "docs/reference").glob("*/*.md"), ROOT / "docs/reference/verl.md"]
    for page in [page for page in pages if page.stem != "errors"]:
        text = page.read_text(encoding="utf-8")
        files = [page.parent / link for link in re.findall(r"\]\(([\w./-]+\.py)\)", text)]
        code = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"^\.\. auto(?:class|function|exception)::.*\.(\w+)$", text, re.MULTILINE):
            assert re.search(rf"^(?:class|def|async def) {name}\b", code, re.MULTILINE), f"{page}: {name}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_errors(folder):
    """The page of errors of a package has a row for each public error, which says when it is raised and what to do."""
    pages = [*(ROOT / f"docs/reference/{folder.parents[1].name}").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    errors = set(re.findall(r"autoexception:: (?:\w+\.)?(\w+)$", text, re.MULTILINE)) & read_exports(folder)
    rows = re.findall(r"^\| (`\w+Error`[^|]*) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+Error)`", row[0])}
    assert errors - listed == set()


def test_variables():
    """The page of environment variables lists each variable that the code names, and no variable that it does not."""
    pattern = r"\b(?:FAIRLEAD|EXECUTOR|MEGASCALE|TPU)_[A-Z_]*[A-Z]\b|\bCOORD_PORT\b"
    listed = set(re.findall(pattern, read("environment-variables.md")))
    code = "".join(path.read_text(encoding="utf-8") for folder in FOLDERS for path in folder.rglob("*.py"))
    named = set(re.findall(rf'"({pattern})"', code)) - {"MEGASCALE_DEFAULT_PORT"}  # A constant of this name.
    assert named - listed == set()
    tools = [
        ROOT / "conftest.py",
        ROOT / "noxfile.py",
        *ROOT.glob("fixtures/*.py"),
        *ROOT.glob("packages/*/tests/**/*.py"),
    ]
    tools += ROOT.glob("integration-tests/**/*.py")
    code += "".join(path.read_text(encoding="utf-8") for path in tools)
    assert [name for name in sorted(listed) if name not in code] == []


def read_constant(file: Path, name: str) -> ast.expr:
    """Return the value that a module assigns to a name."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in ast.unparse(node).split("=")[0].split(":")[0]:
            return node.value
    raise AssertionError(f"{file.name} has no {name}")


def test_verdicts():
    """The guide has a row for each word with which `why` begins a finding, and the reference one for each kind."""
    source = ROOT / "packages/inspect/src/fairlead_inspect"
    words = ast.literal_eval(read_constant(source / "_show.py", "WORDS"))
    words_said = {*words.values(), *ast.literal_eval(read_constant(source / "_show.py", "BLAMES"))}
    rows = re.findall(r"^\| `([A-Z ]+)` \|.*\| [^|]*[014][^|]* \| [^|]+ \|$", read("guides/hung-jobs.md"), re.MULTILINE)
    assert sorted(rows) == sorted(words_said)
    kinds = {
        node.value for node in ast.walk(read_constant(source / "model.py", "Kind")) if isinstance(node, ast.Constant)
    }
    assert words.keys() | {"late", "disk", "node-lost"} == kinds, "these kinds always blame"
    table = "".join(re.findall(r"^\| `[a-z].*\|$", read("reference/inspect/command-line.md"), re.MULTILINE))
    assert {kind for kind in kinds if f"`{kind}`" not in table} == set()


def test_hardware():
    """The README's table of what has been tried on hardware has the rows of the program that tries it."""
    spec = importlib.util.spec_from_file_location("hardware", ROOT / "scripts/hardware.py")
    module = sys.modules["hardware"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = "".join(f"| {row.what} | {row.needs} | {row.passed_on} |\n" for row in module.ROWS)
    assert f"| needs | passed on |\n|---|---|---|\n{rows}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures():
    """Each figure of the README is in the results, against a row that is hand-written, or is a peer's own."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", results, re.MULTILINE | re.DOTALL)
    rows = {
        title.lower().replace(" ", "-"): [line.split("|")[1:3] for line in text.splitlines() if line[:2] == "| "]
        for title, text in sections
    }
    figures = re.findall(r"^\| [^|]+ \| (as fast|[\d.]+(?:x| %) (?:slower|faster)) \| (.+) \|$", readme, re.MULTILINE)
    assert figures
    assert len(re.findall(r"\d(?:x| %) (?:slower|faster)| ms\b", readme)) <= len(figures), "a figure stands elsewhere"
    for figure, link in figures:
        denominator, section = re.fullmatch(r"\[(.+)\]\(benchmarks/RESULTS.md#(.+)\)", link).groups()
        assert "by hand" in denominator or denominator == "verl"
        below = rows[section][[what.strip() for what, _ in rows[section]].index(denominator) + 1 :]
        # What is compared with it is indented by two more spaces.
        compared = itertools.takewhile(lambda row: row[0].startswith("   "), below)
        measured = [
            _as_times(found.group()) for _, text in compared if (found := re.search(r"[\d.]+x( faster)?", text))
        ]
        assert any(abs(times / _as_times(figure) - 1) <= 0.1 for times in measured), (figure, measured)


def _as_times(figure):
    """Return how many times as long something takes, as in "as fast", "10 % slower", "2x faster" or "1.1x"."""
    number = 1.0 if figure == "as fast" else float(re.match(r"[\d.]+", figure).group())
    number = 1 + number / 100 if "%" in figure else number
    return 1 / number if "faster" in figure else number


def test_length():
    """All pages together have at most 55,000 words, the README 110 lines, and the README of a package 150 words."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    words = {page: len((ROOT / page).read_text(encoding="utf-8").split()) for page in listed.split()}
    assert sum(words.values()) <= 55_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110
    assert {page: count for page, count in words.items() if re.match("packages/.*/README", page) and count > 150} == {}


def test_examples():
    """No example imports another one, or a test."""
    examples = sorted(ROOT.glob("examples/*.py"))
    modules = {path.stem for path in examples} | {"conftest", "pytest"}
    for path in examples:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert imported & modules == set(), path.name
