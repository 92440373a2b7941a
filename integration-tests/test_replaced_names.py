# SPDX-License-Identifier: Apache-2.0
"""Each name of a package that tests and benchmarks use or replace exists, including those in programs that they start.

A test on Ray that replaces a missing name would fail late. Names that the sources do not decide are taken to exist.
"""

import ast
import re
import textwrap
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {path.parent.name: path.parent for path in ROOT.glob("packages/*/src/*/__init__.py")}
FOLDERS = ("packages/*/tests", "integration-tests", "benchmarks", "docs")
USES = re.compile(r"fairlead_\w+\._|fairlead_\w+ import _|setattr|patch")  # files without these are not parsed
PRIVATE_NAME = re.compile(r"fairlead_\w+(\.\w+)*\._\w+(\.\w+)*")
REPLACING = ("setattr", "delattr", "object")  # the last one is of `mock.patch.object`


def read_names(source):
    """Yield the full names that a program refers to, each with its line, and those of the programs in its strings."""
    nodes = [*ast.walk(ast.parse(source))]
    bound = defaultdict(set)  # what each name is imported as, "" for other values
    for node in nodes:
        match node:
            case ast.ImportFrom(module=module, level=level, names=names):
                for one in names:
                    bound[one.asname or one.name].add(name := "" if level else f"{module}.{one.name}")
                    yield node.lineno, name
            case ast.Import(names=names):
                for one in names:
                    short = one.name.partition(".")[0]
                    bound[one.asname or short].add(one.name if one.asname else short)
                    yield node.lineno, one.name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                bound[name].add("")

    def full_name(node):
        if isinstance(node, ast.Attribute) and (owner := full_name(node.value)):
            return f"{owner}.{node.attr}"
        return next(iter(bound[node.id])) if isinstance(node, ast.Name) and len(bound[node.id]) == 1 else ""

    for node in nodes:
        texts = []
        match node:
            case ast.Attribute():
                yield node.lineno, full_name(node)
            case ast.Call(func=ast.Attribute(attr=called), args=[owner, ast.Constant(value=name), *_], keywords=given):
                if called in REPLACING and not {one.arg for one in given} & {"raising", "create"}:
                    yield node.lineno, f"{full_name(owner)}.{name}"
            case ast.Constant(value=str() as text):
                texts = read_text(text)
            case ast.JoinedStr(values=parts):
                texts = read_text("".join(one.value if isinstance(one, ast.Constant) else "__part" for one in parts))
        yield from ((node.lineno, name) for name in texts)


def read_text(text):
    """Return a text that is a private name, and the names in a text that is a program."""
    if PRIVATE_NAME.fullmatch(text):
        return [text]
    try:
        is_program = "import fairlead_" in text or "from fairlead_" in text
        return [name for _, name in read_names(textwrap.dedent(text))] if is_program else []
    except SyntaxError:
        return []


def bind(body):
    """Return what binds each name of a module or class."""
    found, todo = {}, [*body]
    while todo:
        match node := todo.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node
            case ast.alias(asname=str() as name) | ast.alias(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found[name.partition(".")[0]] = node
            case _:
                todo.extend(ast.iter_child_nodes(node))
    return found


names_of = cache(lambda path: bind(ast.parse(path.read_bytes()).body))


def exists(name):
    """Return whether a full name exists, or may exist."""
    package, *parts = name.split(".")
    path = SOURCES[package]
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    is_module = bool(parts) and (path / f"{parts[0]}.py").exists()
    bound = names_of(path / (f"{parts.pop(0)}.py" if is_module else "__init__.py"))
    for part in parts:
        owner = bound.get(part)
        if not isinstance(owner, ast.ClassDef) or owner.bases or owner.keywords:
            return owner is not None or part == "*" or part.startswith("__")
        bound = bind(owner.body)
    return True


def find_missing(source):
    names = sorted({(line, name) for line, name in read_names(source) if name.partition(".")[0] in SOURCES})
    return [f"{line} {name}" for line, name in names if not exists(name)]


def test_every_name_exists():
    """No test, no benchmark and no program of theirs refers to a name that has gone."""
    files = {path for folder in FOLDERS for top in ROOT.glob(folder) for path in top.rglob("*.py")} - {Path(__file__)}
    texts = {path: text for path in sorted(files) if USES.search(text := path.read_text(encoding="utf-8"))}
    assert [f"{path.relative_to(ROOT)}:{one}" for path, text in texts.items() for one in find_missing(text)] == []


GONE = """patch.setattr("fairlead_lane._transport.gone", 1)
patch.setattr(_transport._Watcher, "gone", 1)
patch.object(_transport, "gone", return_value=1)
run(f"from fairlead_lane._transport import gone; print({value!r})")
_transport.gone = 1"""


@pytest.mark.parametrize("planted", GONE.splitlines())
def test_a_missing_name_is_found(planted):
    """Each way to refer to a missing name is found."""
    assert len(find_missing(f"from fairlead_lane import _transport\n{planted}")) == 1
