# SPDX-License-Identifier: Apache-2.0
"""Tests of the prose of all pages: spelling, the rules of `prose.toml`, proselint, and the length of sentences.

They read the sources, and import no package.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RULES = tomllib.loads((ROOT / "docs" / "prose.toml").read_text(encoding="utf-8"))
# benchmarks/RESULTS.md is written by a program.
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
PAGES = [page for page in LISTED.split() if not page.startswith("benchmarks/")]
SOURCES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/src/*/__init__.py"))}


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


@cache
def parse(module: Path) -> list[ast.stmt]:
    """Return the statements of a module, including those under a condition."""
    statements = ast.parse(module.read_text(encoding="utf-8")).body
    return [inner for one in statements for inner in ([*one.body, *one.orelse] if isinstance(one, ast.If) else [one])]


def find_module(path: Path) -> Path:
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def find_definition(module: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """Return the class or function that a module defines or imports from Fairlead, with the module that defines it."""
    for node in parse(module):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                if found == name:
                    return module, node
            case ast.ImportFrom(module=source, names=aliases) if source:
                original = next((alias.name for alias in aliases if name == (alias.asname or alias.name)), None)
                if original is not None and node.level:
                    return find_definition(
                        find_module(module.parents[node.level - 1] / Path(*source.split("."))), original
                    )
                if original is not None and (folder := SOURCES.get(source.partition(".")[0])):
                    return find_definition(find_module(folder.parent / Path(*source.split("."))), original)
    return None


def read_members(module: Path, owner: ast.ClassDef) -> dict[str, str]:
    """Return the docstrings of the public methods and properties of a class, including those of its bases."""
    docstrings: dict[str, str] = {}
    for base in owner.bases:
        if found := find_definition(module, ast.unparse(base).partition("[")[0]):
            docstrings |= read_members(*found)
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            docstrings[node.name] = ast.get_docstring(node) or docstrings.get(node.name, "")
    return docstrings


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of all public modules, classes, functions and members, each with its name."""
    for folder in SOURCES.values():
        for module in [folder / "__init__.py", *folder.glob("[!_]*.py"), *folder.glob("[!_]*/__init__.py")]:
            label = ".".join(module.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
            yield label, ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
            for name in read_exports(module):
                if (found := find_definition(module, name)) is None:
                    continue
                yield f"{label}.{name}", ast.get_docstring(found[1]) or ""
                members = read_members(*found) if isinstance(found[1], ast.ClassDef) else {}
                yield from ((f"{label}.{name}.{member}", text) for member, text in members.items())


def read_exports(module: Path) -> list[str]:
    """Return the names in the `__all__` of a module."""
    for node in parse(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


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


def read_messages(source: str) -> Iterator[str]:
    """Yield the texts of errors, warnings and log lines of a module, with CODE for their values."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Raise(exc=ast.Call(args=values)):
                pass
            case ast.Call(func=ast.Attribute(attr="warn" | "warning" | "info" | "error"), args=values):
                pass
            case _:
                continue
        for value in values:
            parts = value.values if isinstance(value, ast.JoinedStr) else [value]
            texts = [part.value if isinstance(part, ast.Constant) else "CODE" for part in parts]
            if all(isinstance(text, str) for text in texts):
                yield "".join(texts)


def test_messages():
    """No sentence of an error, a warning or a log line has over 40 words, or a pattern of the rules."""
    modules = [module for folder in SOURCES.values() for module in folder.rglob("*.py")]
    messages = {text: module.name for module in modules for text in read_messages(module.read_text(encoding="utf-8"))}
    assert len(messages) > 500
    assert {messages[text]: found for text in messages if (found := find_faults(text))} == {}


def test_a_fault_of_a_message_is_found():
    """A fault is found in an error with a value and in a log line."""
    source = 'raise ValueError(f"What {name} wants cannot be had.")\nlogger.warning("What cannot be had.")\n'
    assert [len(find_faults(text)) for text in read_messages(source)] == [2, 2]


def test_every_public_name_has_a_docstring():
    """Each public module, class, function and member has a docstring, which the reference and `help` show."""
    assert [name for name, text in public_docstrings() if not text] == []


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


DENIAL = re.compile(
    r"\b(?:Fairlead|There|It|The package|A link|A group) (?:has no|have no|is no|are no|lacks|"
    r"(?:does|do) not (?:have|support|offer|provide)|cannot) ([^.;:]+)"
)


def read_topics(text: str) -> set[str]:
    """Return the subjects of a page, in lower case: its headings and its entries of the index."""
    entries = [one for line in re.findall(r"^```\{index\} (.*)$", text, re.MULTILINE) for one in line.split(",")]
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[`!?]", "", one).strip().lower() for one in [*entries, *headings]}


def find_denials(pages: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return each page that says that Fairlead lacks something, with its subject and a page that describes that."""
    topics = {topic: page for page, text in pages.items() for topic in read_topics(text)}
    return [
        (page, topic, topics[topic])
        for page, text in pages.items()
        for paragraph in read_paragraphs(text)
        for denied in DENIAL.findall(paragraph)
        for topic in topics
        if re.search(rf"\b{re.escape(topic)}\b", denied.replace("CODE", "").lower()) and topics[topic] != page
    ]


def test_no_page_denies_what_another_describes():
    """No page says that Fairlead lacks what a heading or an entry of the index of another page names."""
    assert find_denials({page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}) == []


def test_a_denial_is_found():
    """A page that denies what another page describes is found, and one that denies something else is not."""
    pages = {"a.md": "Fairlead has no restart of workers.", "b.md": "```{index} ! restart, ! resize\n```\n"}
    assert find_denials(pages) == [("a.md", "restart", "b.md")]
    assert find_denials({**pages, "a.md": "Fairlead has no algorithm."}) == []
