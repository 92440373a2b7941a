# SPDX-License-Identifier: Apache-2.0
"""Tests of the prose of all pages: spelling, the rules of `prose.toml`, proselint, and the length of sentences."""

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RULES = tomllib.loads((ROOT / "docs" / "prose.toml").read_text(encoding="utf-8"))
# benchmarks/RESULTS.md is written by a program.
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
PAGES = [page for page in LISTED.split() if not page.startswith("benchmarks/")]


def read_paragraphs(text: str) -> list[str]:
    """Return the paragraphs and list items of a page as plain text, without code, tables, headings and link targets."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(?:\||#|\[[A-Z]\d+\]:|<).*$", "\n", text, flags=re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
        plain = re.sub(r"^(?:[-*]|\d+\.)\s+", "", " ".join(block.split()))
        plain = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\))?", r"\1", plain)
        if plain := re.sub(r"`[^`]*`", "CODE", plain):
            found.append(plain.replace("*", ""))
    return found


def split_sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.!?:])[\"')]*\s+(?=[A-Z\"'(])", paragraph)


def find_faults(text: str) -> list[str]:
    """Return the sentences of a page that are too long or that a rule finds, each with the reason."""
    faults = []
    for sentence in (one for paragraph in read_paragraphs(text) for one in split_sentences(paragraph)):
        words = len(re.findall(r"\S*\w\S*", sentence))
        if words > RULES["longest_sentence"]:
            faults.append(f"{words} words: {sentence}")
        faults += [f"{rule['instead']}: {sentence}" for rule in RULES["rule"] if re.search(rule["pattern"], sentence)]
    return faults


def test_sentences():
    """No sentence outside of tables and code has over 40 words, or a pattern of the rules."""
    assert len(PAGES) > 40
    faults = {page: found for page in PAGES if (found := find_faults((ROOT / page).read_text(encoding="utf-8")))}
    assert faults == {}


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of all public modules, classes, functions and members, each with its name."""
    for folder in sorted(ROOT.glob("packages/*/src/*/")):
        if not (folder / "__init__.py").is_file():
            continue
        stems = [one.name for one in pkgutil.iter_modules([str(folder)]) if not one.name.startswith("_")]
        for module in map(importlib.import_module, [folder.name, *(f"{folder.name}.{stem}" for stem in stems)]):
            yield module.__name__, module.__doc__ or ""
            for name in module.__all__:
                owner = getattr(module, name)
                if not getattr(owner, "__module__", "").startswith("fairlead_"):
                    continue
                members = inspect.getmembers(owner) if inspect.isclass(owner) else []
                for label, member in [(name, owner), *((f"{name}.{one}", it) for one, it in members if one[0] != "_")]:
                    is_member = inspect.isclass(member) or isinstance(member, property) or inspect.isroutine(member)
                    if is_member and str(getattr(member, "__module__", "fairlead_")).startswith("fairlead_"):
                        yield f"{module.__name__}.{label}", inspect.getdoc(member) or ""


def plain_docstring(text: str) -> str:
    """Return a docstring as Markdown: without examples, with code in single backticks, and each entry on its own."""
    text = re.sub(r"^ *>>> .*(?:\n(?!\s*$).*)*", "", inspect.cleandoc(text), flags=re.MULTILINE)
    text = re.sub(r"^[A-Z]\w*:$", "", text.replace("``", "`"), flags=re.MULTILINE)
    return re.sub(r"^ +\*{0,2}\w+(?:, \w+)*: ", "\n", text, flags=re.MULTILINE)


def test_docstrings():
    """No sentence of a public docstring has over 40 words, or a pattern of the rules."""
    docstrings = dict(public_docstrings())
    assert len(docstrings) > 500
    faults = {name: found for name, text in docstrings.items() if (found := find_faults(plain_docstring(text)))}
    assert faults == {}


def test_a_fault_of_a_docstring_is_found():
    """A fault is found in each section of a docstring, and none in its example."""
    text = "Do it.\n\n    Args:\n        one: What cannot be had.\n\n    Returns:\n        What is had.\n\n"
    assert len(find_faults(plain_docstring(text + '    >>> "What cannot be had."\n'))) == 3


@pytest.mark.parametrize("rule", RULES["rule"], ids=lambda rule: rule["finds"])
def test_each_rule_finds_its_example(rule):
    """Each rule finds its example, and does not find the example in code."""
    assert any(fault.startswith(rule["instead"]) for fault in find_faults(rule["finds"]))
    assert find_faults(f"`{rule['finds']}`\n\n```text\n{rule['finds']}\n```\n") == []


def test_long_sentence_is_found():
    """A sentence with 41 words is found, and one with 40 is not."""
    assert find_faults("word " * 40 + ".") == []
    assert len(find_faults("- " + "word " * 41 + ".")) == 1


def test_spelling():
    """codespell finds nothing in pages and code."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    command = [sys.executable, "-m", "codespell_lib", *listed.stdout.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr


def test_proselint(tmp_path):
    """Proselint finds nothing in the paragraphs of the pages."""
    config = tmp_path / "proselint.json"
    config.write_text(json.dumps({"checks": dict.fromkeys(RULES["proselint_off"], False)}))
    for page in PAGES:
        plain = "\n\n".join(read_paragraphs((ROOT / page).read_text(encoding="utf-8")))
        (tmp_path / page.replace("/", "__")).write_text(plain + "\n", encoding="utf-8")
    files = sorted(map(str, tmp_path.glob("*.md")))
    assert lint(config, files) == ""
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("This is a very unique and literally unique idea, at the end of the day.\n")
    assert "very unique" in lint(config, [str(wrong)])


def lint(config: Path, files: list[str]) -> str:
    command = [sys.executable, "-m", "proselint", "check", "--config", str(config), "-o", "full", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
