# SPDX-License-Identifier: Apache-2.0
"""The package depends on nothing, and runs on every system."""

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

import fairlead_rollouts

MODULES = sorted(Path(fairlead_rollouts.__file__).parent.rglob("*.py"))
HEAVY = {"numpy", "opentelemetry", "ray", "rich", "torch"}
# Functions of `os` and `signal`, and modules, that some systems lack.
UNIX = {"fork", "forkpty", "kill", "killpg", "mkfifo", "sched_getaffinity", "pidfd_open", "eventfd", "sendfile"}
OPTIONAL = {
    "ray.py": {"ray"},
    "_show.py": {"rich"},
    "metrics.py": {"opentelemetry"},
    "verl.py": {"verl"},
    "slime.py": {"slime"},
    "miles.py": {"miles"},
    "plugin.py": {"pytest"},
    "suite.py": {"pytest"},
}
USE = """
    import sys
    from fairlead_rollouts import IndexStream, Ledger, LedgerConfig, Ref
    ledger = Ledger(LedgerConfig(group_size=1, groups_per_version=2, max_staleness=1), IndexStream(10, seed=0))
    for lease in ledger.lease(2):
        ledger.seal(lease, 0, Ref("a"))
    ledger.claim(1, 2)
    ledger.advance(1, trained=1)
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "opentelemetry", "ray", "rich", "torch"}))
"""


def test_version_equals_that_of_the_distribution():
    """The literal version and the installed metadata agree."""
    assert fairlead_rollouts.__version__ == importlib.metadata.version("fairlead-rollouts")


def test_nothing_heavy_is_imported(run_python):
    """The ledger imports no other package, even if it is installed, and works if none can be imported."""
    assert run_python(USE).strip() == "[]"
    assert run_python(USE, block=[*HEAVY, "typing_extensions"]).strip() == "[]"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: f"{module.parent.name}/{module.name}")
def test_imports(module, read_imports):
    """Imports are relative or of the standard library, and exist on every system; files are short and licensed."""
    text = module.read_text(encoding="utf-8")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert len(text.splitlines()) < 500
    imported = read_imports(module)
    assert imported <= set(sys.stdlib_module_names) | OPTIONAL.get(module.name, set())
    assert imported & {"fcntl", "grp", "posix", "pwd", "resource", "select", "termios"} == set()
    calls = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert calls & UNIX == set()
    assert "/proc" not in text
