# SPDX-License-Identifier: Apache-2.0
"""Run the suite against a vendored copy if the variable SHARDING_UNDER_TEST names one.

The tests import the package by its ordinary name. For a copy, that name is an alias of the copy, and the installed
package is blocked: whatever a test then reaches comes from the copy.
"""

import importlib
import os
import subprocess
import sys
import textwrap
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from hypothesis import settings

INSTALLED = "fairlead_sharding"


class Block(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == INSTALLED:
            raise ModuleNotFoundError(f"{fullname} is blocked while a copy is tested", name=fullname)


if copy := os.environ.get("SHARDING_UNDER_TEST"):
    sys.meta_path.insert(0, Block())
    sys.modules[INSTALLED] = importlib.import_module(copy)

# No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
settings.register_profile("fairlead", max_examples=150, deadline=None, database=None)
settings.load_profile("fairlead")


BLOCK = """
import sys
class Block:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{fullname}} is blocked", name=fullname)
sys.meta_path.insert(0, Block())
"""


@pytest.fixture
def run_python(tmp_path):
    """Run a script in a fresh interpreter that cannot import the modules in ``block``, and return its output."""
    import fairlead_sharding as subject

    root = Path(subject.__file__).parents[subject.__name__.count(".") + 1]

    def run(script, block=(), **env):
        return subprocess.run(
            [sys.executable, "-c", BLOCK.format(names=block) + textwrap.dedent(script)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]), **env},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        ).stdout

    return run
