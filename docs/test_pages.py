# SPDX-License-Identifier: Apache-2.0
"""Every example of the documentation runs, and gives what the page says.

The python blocks of a page run in order, in a process and a Ray of their own. `expression  # value` says what the
expression's value is, `print(...)  # text` what is printed; a text block right after a python block is what that
prints. A block that cannot run here stands after a line `<!-- not run: reason -->`.
"""

import ast
import contextlib
import doctest
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

import fairlead_venvs
from fairlead_placement import init_ray

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


# Each of its blocks raises an error.
ERRORS = DOCS / "troubleshooting.md"
RUNNABLE = [page for page in PAGES if page != ERRORS and any(block.why_not is None for block in blocks(page))]


@pytest.mark.timeout(330)
@pytest.mark.parametrize("page", RUNNABLE, ids=names(RUNNABLE))
def test_examples(page, tmp_path, unused_port):
    """The python blocks of a page run, one after the other, and what the page promises holds."""
    run_alone(page, tmp_path, unused_port)


def run_alone(page: Path, tmp_path: Path, port: int) -> None:
    """Run the blocks of a page in a process of their own, with a port for the coordinator of several TPU slices."""
    own = {"RAY_ADDRESS": "local", "FAIRLEAD_VENV_DIR": str(tmp_path / "venvs"), "COORD_PORT": str(port)}
    env = {**os.environ, **own}
    command = [sys.executable, __file__, str(page)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


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


# The pages outside of this folder whose python blocks are run, with the test that runs all of them.
RUN_ELSEWHERE = {
    "README.md": "integration-tests/test_readme.py",
    "packages/batching/README.md": "packages/batching/tests/unit/test_docs.py",
    "packages/inspect/README.md": "packages/inspect/tests/ray/test_readme.py",
    "packages/lane/README.md": "packages/lane/tests/ray/test_readme.py",
    "packages/placement/README.md": "packages/placement/tests/ray/test_docs.py",
    "packages/rollouts/README.md": "packages/rollouts/tests/unit/test_docs.py",
    "packages/sharding/README.md": "packages/sharding/tests/unit/test_docs.py",
    "packages/tpu-executor/README.md": "packages/tpu-executor/tests/ray/test_docs.py",
    "packages/transfer/README.md": "packages/transfer/tests/ray/test_readme.py",
    "packages/venvs/README.md": "packages/venvs/tests/ray/test_docs.py",
    "packages/verl/README.md": "packages/verl/tests/unit/test_docs.py",
    "packages/workergroup/README.md": "packages/workergroup/tests/ray/test_package.py",
}
ONE_BLOCK = [page for page in RUN_ELSEWHERE if not re.search(r"/(?:batching|sharding|workergroup)/", page)]
# Blocks of text that no python block prints, by the beginning of their first line, with their origin.
TEXTS = {
    "Ray Cluster: 1 node, 4 CPUs": "the output of `nox -s demo`",
    "Attached to the Ray cluster at": "log lines of init_ray, which the tests of placement compare",
    "lane   transfer": "a diagram",
    "driver   ": "a diagram",
    "srun bash -c '": "a part of examples/clusters/slurm.sbatch",
    "┏━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓": "the doctor's output on another cluster",
    "from nemo_rl.distributed.named_sharding import NamedSharding": "a program of NeMo RL",
    "PlacementTimeoutError: Waited 1.0 s:": "the refusal in placement's README",
    "TPU slices": "the output of a command line, in tpu-executor's README",
    "actor_rollout_ref.rollout.checkpoint_engine:": "the configuration of verl, as in packages/transfer/tests/seams",
    "policy.generation.refit_transport:": "the configuration of NeMo RL, as in packages/transfer/tests/seams",
    "HANGS     rank 2 of WorkerDict": "what `why` says of the job like_verl, which integration-tests/inspect runs",
    "HANGS     rank 2 of Trainer": "what `why` says of the job skipped, which integration-tests/inspect runs",
}


def test_every_block_is_run():
    """Each block of each page is a program that a test runs, what one prints, a command, a table, or listed here."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=DOCS.parent, check=True, capture_output=True, text=True)
    unknown = []
    for page in listed.stdout.split():
        text = (DOCS.parent / page).read_text(encoding="utf-8")
        fences = list(re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        programs = [fence for fence in fences if fence[1] == "python"]
        assert not programs or page.startswith("docs/") or page in RUN_ELSEWHERE, page
        assert len(programs) == 1 or page not in ONE_BLOCK, page
        for fence in fences:
            printed = text[: fence.start()].rstrip("\n").endswith("```") and any(
                text[one.end() : fence.start()].strip() == "" for one in programs
            )
            match fence[1]:
                case "python":
                    pass
                case "text" if printed or fence[2].strip().startswith(tuple(TEXTS)):
                    pass
                case "console" | "sh":
                    pass  # integration-tests/test_commands.py looks for the command in sessions and tests.
                case "toml" if has_environments(fence[2]):
                    pass
                case directive if directive.startswith("{"):
                    pass
                case _:
                    unknown.append(f"{page}: {fence[0][:60]!r}")
    assert unknown == []
    assert all((DOCS.parent / test).is_file() for test in RUN_ELSEWHERE.values())


def has_environments(text: str) -> bool:
    """Return whether a pyproject's table lists environments that fairlead-venvs accepts."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for project in ("trainer", "rollout"):
            Path(project).mkdir()
            Path(project, "pyproject.toml").touch()
        Path("pyproject.toml").write_text(text)
        return len(fairlead_venvs.known_actor_environments()) == text.count(".workers.")


MEASURED = {
    "faq.md": ["1.24 ms"],
    "index.md": ["32.4 ms", "7.0x faster", "25 ms", "1.24 ms", "65.1 ms"],
    "failure-model.md": ["32.4 ms", "25 ms, at worst 26 ms", "0.58 s", "0.5 s before Ray says so"],
    "design.md": ["3.6 ms", "538 ms", "76.7 ms", "2.7x faster", "2.7 us", "1.27 us", "17.1 ms", "1.24 ms"],
    "guides/elastic.md": ["0.06 s"],
    "guides/performance.md": [
        "1.10x",
        "1.08x",
        "1.00x",
        "315 us",
        "830 us",
        "10.1 ms",
        "53.4 ms",
        "0.07 s",
        "0.36 s",
        "0.47 s",
    ],
    "guides/sharding.md": ["2.7 us"],
}


@pytest.mark.parametrize("page", MEASURED)
def test_figures(page):
    """What a page says was measured stands in RESULTS.md."""
    results = (DOCS.parent / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert [figure for figure in MEASURED[page] if figure not in text or figure not in results] == []


def test_sources():
    """Each row of the comparison names the source of what it says about another system, and each source is used."""
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text.split("\n## ", 1)[1], re.MULTILINE)
    others = [(system, said) for system, said in rows if system not in ("system", "Fairlead") and "---" not in system]
    assert len(others) > 60
    assert [row for row in others if not re.search(r"\(\[[A-Z]\d+\]", row[1])] == []
    linked, used = (set(re.findall(pattern, text, re.M)) for pattern in (r"^\[([A-Z]\d+)\]:", r"\[([A-Z]\d+)\](?!:)"))
    assert linked == used


PACKAGES = sorted(path.parent.parent for path in DOCS.parent.glob("packages/*/src/*/__init__.py"))


def public_errors() -> dict[str, Path]:
    """Return the public error classes by name, each with the folder of its package."""
    found = {}
    for folder in PACKAGES:
        package = importlib.import_module(next(folder.glob("*/__init__.py")).parent.name)
        for name in package.__all__:
            one = getattr(package, name)
            if isinstance(one, type) and issubclass(one, BaseException):
                found[name] = folder
    return found


def test_every_name_is_in_a_summary():
    """The reference page of each package has a row for each public name, with a link to the page of the name."""
    for folder in PACKAGES:
        package = importlib.import_module(next(folder.glob("*/__init__.py")).parent.name)
        page = DOCS / "reference" / f"{folder.parent.name}.md"
        linked = dict(re.findall(r"^\| \[`(\w+)`\]\((\S+)\) \|", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert sorted(linked) == sorted(set(package.__all__) - {"__version__"})
        for name, target in linked.items():
            text = (page.parent / target).read_text(encoding="utf-8")
            assert re.search(rf":: (?:{package.__name__}\.)?{name}$", text, re.MULTILINE), f"{target} has no {name}"


@functools.cache
def texts_of(folder: Path) -> list[str]:
    """Return the texts in the code of a package, with `...` for each value that is formatted into them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    found = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(one.value if isinstance(one, ast.Constant) else "..." for one in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_every_error_has_an_entry():
    """Troubleshooting has an entry for each public error, with a cause, a remedy, and messages that the code has."""
    page, errors, sections = read(ERRORS.name), public_errors(), sections_of_errors()
    assert list(sections) == sorted(errors)
    assert re.findall(r"^\[(\w+)\]\(#", page, re.MULTILINE) == sorted(errors)
    for name, section in sections.items():
        assert section.count("**Cause:**") == section.count("**Remedy:**") == 1, name
        messages = re.findall(r"^- \*\*Message:\*\* `(.+)`$", section, re.MULTILINE)
        assert bool(messages) is (name not in ("RolloutError", "TpuExecutorError")), name
        for message in messages:
            # A package above may raise the error too.
            texts = (text for folder in (errors[name], *PACKAGES) for text in texts_of(folder))
            assert any(has_message(text, message) for text in texts), f"{name}: {message}"


@pytest.mark.timeout(330)
def test_every_error_is_raised(tmp_path, unused_port):
    """The example of each entry of Troubleshooting raises its error, at the line that says so; else a test does."""
    for name, section in sections_of_errors().items():
        reason = re.search(r"^<!-- no example: (.+) -->$", section, re.MULTILINE)
        assert bool(reason) is not ("```python" in section), name
        if reason is not None and (needs := reason[1]) != "it is a base class":
            assert name in (DOCS.parent / needs.rpartition("; ")[2]).read_text(encoding="utf-8"), name
    run_alone(ERRORS, tmp_path, unused_port)


def sections_of_errors() -> dict[str, str]:
    return dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", read(ERRORS.name), re.MULTILINE | re.DOTALL))


def test_every_variable_is_listed():
    """The page of environment variables lists each variable that the code names, and no variable that it does not."""
    pattern = r"\b(?:FAIRLEAD|EXECUTOR|MEGASCALE|TPU)_[A-Z_]*[A-Z]\b|\bCOORD_PORT\b"
    listed = set(re.findall(pattern, read("environment-variables.md")))
    code = "".join(path.read_text() for folder in PACKAGES for path in folder.rglob("*.py"))
    named = set(re.findall(rf'"({pattern})"', code)) - {"MEGASCALE_DEFAULT_PORT"}  # A constant of this name.
    assert named - listed == set()
    tests = "".join(path.read_text() for path in DOCS.parent.glob("*/**/tests/**/*.py"))
    tests += (DOCS.parent / "noxfile.py").read_text()
    assert [name for name in sorted(listed) if name not in code + tests] == []


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def has_message(text: str, message: str) -> bool:
    """Return whether a text of the code contains the parts of a message, in their order."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    return re.search(".*".join(parts), text, re.DOTALL) is not None


def test_a_wrong_message_is_found():
    """A message that the code does not have is found, also if its parts are in another order."""
    assert has_message("rank ... raised ...: ...", "rank ... raised ...")
    assert not has_message("rank ... raised ...: ...", "raised ... rank ...")
    assert not has_message("rank ... raised ...: ...", "rank ... died")


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
    """Without what differs from run to run: addresses, ids, times, widths of columns; what Ray says besides."""
    text = re.sub(r"^(\x1b\[\d+m)?\(raylet\).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS", text)
    text = re.sub(r"\b[0-9a-f]{6,}\b", "ID", text)
    text = re.sub(r"\bpid \d+", "pid N", re.sub(r"\b[\d.]+ (m?s|MB|kB)\b", r"N \1", text))
    lines = re.sub(r"[ ]+", " ", re.sub(r"[─━]+", "─", text)).splitlines()
    return "".join(line.strip() + "\n" for line in lines).strip("\n") + "\n"


def compare(wanted: str, got: str) -> None:
    if not same(wanted, got):
        raise AssertionError(f"the page says\n{wanted}\nand it is\n{got}")


def run(page: Path) -> None:
    if any(re.search(r"init_ray|launch\(", block.code) for block in blocks(page)):
        sys.path.append(str(DOCS.parent))
        from conftest import start_less_of_ray

        start_less_of_ray(pytest.MonkeyPatch(), Path(tempfile.mkdtemp(dir=Path.cwd().parent)))
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


def run_errors() -> None:
    """Run each example of Troubleshooting; those that need a Ray share one."""
    examples = {re.findall(r"# raises (\w+)$", block.code, re.MULTILINE)[0]: block for block in blocks(ERRORS)}
    needs_ray = {name: bool(re.search(r"init_ray\(\)|launch\(", block.code)) for name, block in examples.items()}
    for name in sorted(examples, key=lambda name: needs_ray[name]):
        block, before = examples[name], dict(os.environ)
        if needs_ray[name] and not ray.is_initialized():
            init_ray(address="local", num_cpus=4)
        (line,) = [at for at, text in enumerate(block.code.splitlines(), 1) if text.endswith(f"# raises {name}")]
        try:
            exec(compile(block.code, name, "exec"), {"__name__": "__main__"})
        except Exception as error:
            at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
            if (type(error).__name__, at[:1]) != (name, [line]):
                raise AssertionError(f"the example of {name} raises {type(error).__name__} in line {at}") from error
        else:
            raise AssertionError(f"the example of {name} raises nothing")
        finally:
            os.environ.clear()
            os.environ.update(before)


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    if chosen == ERRORS:
        run_errors()
    else:
        run(chosen)
