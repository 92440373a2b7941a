# SPDX-License-Identifier: Apache-2.0
"""Tests that every command and every program on a page is run by a nox session or a test."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {folder.parent.name for folder in ROOT.glob("packages/*/pyproject.toml")}
# The sessions of the noxfile, each with whether it has a parameter.
SESSIONS = {
    node.name: len(node.decorator_list) > 1
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and any("nox.session" in ast.unparse(one) for one in node.decorator_list)
}
# Commands of other programs that the pages mention.
FOREIGN = ("git ", "ray ", "uv ", "export ", "cd ", ". .venv/bin/activate", "hatchling version ")
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def exists(session: str) -> bool:
    """Return whether the noxfile has a session such as `lint` or `tests(placement)`."""
    name, has_parameter, _ = session.partition("(")
    return name in SESSIONS and (SESSIONS[name] or not has_parameter)


def commands(page: str) -> list[str]:
    """Return the commands in the shell blocks of a page and in its inline code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"^```(?:console|sh|bash)\n(.*?)^```", text, re.M | re.S))
    typed = [part.strip() for line in blocks.splitlines() for part in line.split("#")[0].split("&&") if part.strip()]
    inline = re.findall(r"`((?:nox|pip install|python -m|python) [^`]*)`", text.replace(blocks, ""))
    return typed + [part.strip() for line in inline for part in line.split("&&")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands(page):
    """Each command names a session, a package, a file, or a subcommand that the tests of its package run."""
    for command in commands(page):
        words = command.replace('"', "").split(" -- ")[0].split()
        match words:
            case ["nox", *names]:
                assert all(exists(name) for name in names if name not in ("-s", "...")), command
            case ["pip", "install", *_, "nox"] | ["pip", "install", "nox"]:
                assert "pip install --quiet nox && nox\n" in (ROOT / ".ci/run").read_text()
            case ["pip", "install", *folders] if command.startswith("pip install ./packages/"):
                # nox installs the folders of a package and of its siblings in one call, as such a command does.
                assert {folder.removeprefix("./packages/") for folder in folders} <= PACKAGES, command
            case ["pip", "install", *_, name]:
                assert re.sub(r"\[.*", "", name).removeprefix("fairlead-") in PACKAGES, command
            case ["python3", "-m", "venv", _]:
                assert "python3 -m venv" in (ROOT / ".ci/run").read_text()
            case ["python", "-m", module, *more]:
                package = module.removeprefix("fairlead_").replace("_", "-")
                tests = "".join(path.read_text() for path in ROOT.glob(f"packages/{package}/tests/**/*.py"))
                named = re.findall(r"\w+", more[0]) if more else []
                assert f'"-m", "{module}"' in tests, command
                assert all(f'"{name}"' in tests for name in named), command
            case ["python", file, *_]:
                assert (ROOT / file).is_file(), command
                runners = (ROOT / "noxfile.py", *Path(__file__).parent.glob("test_*.py"))
                assert any(Path(file).name in runner.read_text() for runner in runners), command
            case _ if page == "docs/guides/sharding.md":
                # The session `vendor` runs all shell blocks of that page.
                assert "cp -r" in command or command.startswith("cp "), command
            case _:
                assert command.startswith(FOREIGN), f"no session or test runs {command!r}"


OUTSIDE = [page for page in PAGES if not page.startswith("docs/")]  # docs/test_pages.py runs the programs in docs/.


@pytest.mark.parametrize(
    "page", [page for page in OUTSIDE if "```python\n" in (ROOT / page).read_text(encoding="utf-8")]
)
def test_programs(page):
    """A page with a program is a README, and a test of its folder runs the program."""
    folders = {
        "README.md": "integration-tests",
        **{f"packages/{name}/README.md": f"packages/{name}" for name in PACKAGES},
    }
    tests = [path.read_text(encoding="utf-8") for path in ROOT.glob(f"{folders[page]}/**/test_*.py")]
    assert any("README.md" in text and re.search("run_readme|```python", text) for text in tests), page
