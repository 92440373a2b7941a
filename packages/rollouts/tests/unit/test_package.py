# SPDX-License-Identifier: Apache-2.0
"""The package depends on nothing, runs on every system, and its examples run."""

import ast
import doctest
import importlib
import sys
from pathlib import Path

import fairlead_rollouts

FOLDER = Path(fairlead_rollouts.__file__).parent
README = Path(__file__).parents[2] / "README.md"
HEAVY = {"numpy", "ray", "rich", "torch"}
# Functions of `os` and `signal`, and modules, that some systems lack.
UNIX = {"fork", "forkpty", "kill", "killpg", "mkfifo", "sched_getaffinity", "pidfd_open", "eventfd", "sendfile"}
OPTIONAL = {f"{name}.py": {name} for name in ("ray", "slime", "miles")}
USE = """
    import sys
    from fairlead_rollouts import IndexStream, Ledger, LedgerConfig, Ref
    ledger = Ledger(LedgerConfig(group_size=1, groups_per_version=2, max_staleness=1), IndexStream(10, seed=0))
    for lease in ledger.lease(2):
        ledger.finish(lease, 0, Ref("a"))
    ledger.claim(1, 2)
    ledger.advance(1, trained=1)
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "ray", "rich", "torch"}))
"""


def test_nothing_heavy_is_imported(run_python):
    """The ledger imports no other package, even if it is installed, and works if none can be imported."""
    assert run_python(USE).strip() == "[]"
    assert run_python(USE, block=[*HEAVY, "typing_extensions"]).strip() == "[]"


def test_imports(read_imports):
    """Imports are relative or of the standard library, and modules and functions exist on every system."""
    for module in sorted(FOLDER.glob("*.py")):
        imported = read_imports(module)
        assert imported <= set(sys.stdlib_module_names) | OPTIONAL.get(module.name, set()), module
        # The file of a ledger is refused on a system without `flock`.
        unix = {"fcntl"} if module.name != "_file.py" else set()
        unix |= {"grp", "posix", "pwd", "resource", "select", "termios"}
        assert imported & unix == set(), module
        text = module.read_text(encoding="utf-8")
        attributes = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        assert attributes & UNIX == set(), module
        assert "/proc" not in text, module


def test_examples_in_docstrings():
    """The examples in docstrings print what they show."""
    attempted = 0
    for source in sorted(FOLDER.glob("*.py")):
        if source.name != "ray.py":
            name = fairlead_rollouts.__name__ if source.stem == "__init__" else f"fairlead_rollouts.{source.stem}"
            results = doctest.testmod(importlib.import_module(name), extraglobs=vars(fairlead_rollouts))
            assert results.failed == 0, source.name
            attempted += results.attempted
    assert attempted > 15


def test_readme(run_readme):
    """The python blocks of the README run in order, and the values in their comments are right."""
    assert run_readme(README) == 3
