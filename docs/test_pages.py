# SPDX-License-Identifier: Apache-2.0
"""Every example of the documentation runs, and gives what the page says.

The python blocks of a page run in order, in a namespace of their own. All pages share one process and one Ray, except
those in `ALONE`. `expression  # value` states the value of an expression, and `print(...)  # text` states what is
printed. A text block right after a python block shows what that block prints. A line `<!-- not run: reason -->`
precedes a block that cannot run here.
"""

import ast
import contextlib
import doctest
import gc
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import ray

import fairlead_venvs

DOCS = Path(__file__).parent
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    shown: str | None
    why_not: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start("code")), found["code"], found["shown"], found["why"])
        for found in BLOCK.finditer(text)
    ]


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(DOCS)) for page in pages]


RUNNABLE = [page for page in PAGES if any(block.why_not is None for block in blocks(page))]
# The pages that run in a process of their own, with the reason.
ALONE = {
    "compiled-graphs.md": "For each compiled graph, Ray keeps an actor until its driver exits.",
    "faq.md": "Two reservations compete for exactly four CPUs.",
    "guides/hung-jobs.md": "The page labels its process for the rest of its life, and looks at all jobs of its Ray.",
    "guides/jobs.md": "Two drivers compete for exactly two CPUs.",
    "guides/placement.md": "The page starts a cluster of several nodes, and removes one of them.",
    "guides/tpu-executor.md": "The page starts a cluster of simulated TPU slices, and kills hosts of it.",
}
TOGETHER = [page for page in RUNNABLE if str(page.relative_to(DOCS)) not in ALONE]


@pytest.fixture
def own_folder(tmp_path, monkeypatch, coordinator_port):
    """Run a test in an empty folder, and undo its changes of the variables and registrations of the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRLEAD_VENV_DIR", str(tmp_path / "venvs"))
    with mock.patch.dict(os.environ), mock.patch.dict(fairlead_venvs.actor_environments):
        yield


@contextlib.contextmanager
def use_shared(shared_ray):
    """Lend the shared Ray to a page, which must leave it running. If the page fails, the next one gets a new Ray."""
    shared_ray.ensure()
    try:
        yield
        assert ray.is_initialized(), "The page shuts the shared Ray down."
    except BaseException:
        shared_ray.end()
        raise


@pytest.mark.usefixtures("local_ray", "own_folder")
@pytest.mark.parametrize("page", TOGETHER, ids=names(TOGETHER))
def test_examples(page, shared_ray):
    """The python blocks of a page run, one after the other, and show the values and texts that the page states."""
    with use_shared(shared_ray):
        run(page)


@pytest.mark.timeout(330)
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("page", ALONE)
def test_examples_alone(page):
    """The python blocks of a page run in a process of their own."""
    command = [sys.executable, __file__, str(DOCS / page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "block",
    [
        "```python\n1 + 1  # 3\n```\n",
        "```python\nif True:\n    1 + 1  # 3\n```\n",
        "```python\nprint('one')  # two\n```\n",
        "```python\nprint('one')\n```\n\n```text\ntwo\n```\n",
        "```python\nprint('one')\n```\n\n```text\none\ntwo\n```\n",
        "```python\npass\n```\n\n```text\none\n```\n",
    ],
)
def test_a_wrong_example_fails(block, tmp_path):
    """A page that states another value or another text than its blocks give fails."""
    page = tmp_path / "page.md"
    page.write_text(block)
    with pytest.raises(AssertionError, match="the page says"):
        run(page)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_all_blocks_are_seen(page):
    """No block is left out for the way it is written."""
    assert len(re.findall(r"```\s*(?:python|py)\b", page.read_text(encoding="utf-8"))) == len(blocks(page))


def test_few_blocks_are_not_run():
    """A block that is not run says what it needs or which file runs the like, and is an exception."""
    everything = [block for page in PAGES for block in blocks(page)]
    reasons = [block.why_not for block in everything if block.why_not is not None]
    assert len(reasons) <= len(everything) // 8
    for reason in reasons:
        files = re.findall(r"(?:examples|integration-tests|packages)/[\w/-]+\.py", reason)
        assert files or reason.startswith("needs "), reason
        assert all((DOCS.parent / file).is_file() for file in files), reason


def test_tables_of_environments(tmp_path, monkeypatch):
    """fairlead-venvs accepts each table of a pyproject.toml on the pages, and finds all environments in it."""
    text = "\n".join(map(Path.read_text, PAGES))
    tables = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(tables) > 1
    monkeypatch.chdir(tmp_path)
    for project in ("trainer", "rollout"):
        Path(project).mkdir()
        Path(project, "pyproject.toml").touch()
    for table in tables:
        Path("pyproject.toml").write_text(table)
        assert len(fairlead_venvs.known_actor_environments()) == table.count(".workers.")


class Checked(ast.NodeTransformer):
    """`expression  # value` becomes a comparison, also in `with` and `try`; not in functions, which run elsewhere."""

    def __init__(self, code: str) -> None:
        self.lines = code.splitlines()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        # Offsets count bytes.
        rest = self.lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
        if not rest.startswith("# "):
            return node
        value = node.value
        printed = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"
        name, given = ("_printed", value.args) if printed else ("_has_value", [value])
        call = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(rest.removeprefix("# ")), *given], [])
        return ast.copy_location(ast.Expr(call), node)


def same(wanted: str, got: str) -> bool:
    return doctest.OutputChecker().check_output(without_ids(wanted), without_ids(got), doctest.ELLIPSIS)


def without_ids(text: str) -> str:
    """Remove what differs from run to run (addresses, ids, times, widths of columns), and the log lines of Ray."""
    text = re.sub(r"^(\x1b\[\d+m)?\((raylet|\S+ pid=\d+)\b.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS", text)
    text = re.sub(r"\b[0-9a-f]{6,}\b", "ID", text)
    text = re.sub(r"\bpid \d+", "pid N", re.sub(r"\b[\d.]+ (m?s|MB|kB)\b", r"N \1", text))
    lines = re.sub(r"[ ]+", " ", re.sub(r"[─━]+", "─", text)).splitlines()
    return "".join(line.strip() + "\n" for line in lines).strip("\n") + "\n"


def compare(wanted: str, got: str) -> None:
    if not same(wanted, got):
        raise AssertionError(f"the page says\n{wanted}\nand it is\n{got}")


def run(page: Path) -> None:
    """Run the blocks of a page in one new namespace, and compare what they give with what the page states."""
    scope = {
        "__name__": "__main__",
        "_has_value": lambda wanted, value: compare(wanted, repr(value)),
        "_printed": lambda wanted, *values: compare(wanted, " ".join(map(str, values))),
    }
    for block in blocks(page):
        if block.why_not is not None:
            continue
        tree = ast.fix_missing_locations(Checked(block.code).visit(ast.parse(block.code)))
        code = compile(ast.increment_lineno(tree, block.line), str(page), "exec")
        if block.shown is None:
            exec(code, scope)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, scope)
        compare(block.shown, printed.getvalue())
    # A program drops its objects when it exits. Ray stops the actors of the last handles.
    scope.clear()
    gc.collect()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
