# SPDX-License-Identifier: Apache-2.0
"""Run the suite against a vendored copy if the variable SHARDING_UNDER_TEST names one.

The tests import the package by its ordinary name. For a copy, that name is an alias of the copy, and the installed
package is blocked: whatever a test then reaches comes from the copy.
"""

import functools
import importlib
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

INSTALLED = "fairlead_sharding"


class Block(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == INSTALLED:
            raise ModuleNotFoundError(f"{fullname} is blocked while a copy is tested", name=fullname)


if copy := os.environ.get("SHARDING_UNDER_TEST"):
    sys.meta_path.insert(0, Block())
    sys.modules[INSTALLED] = importlib.import_module(copy)


@pytest.fixture
def run_python(run_python, tmp_path):
    """Let the scripts import the package under test, which may be a copy."""
    import fairlead_sharding as subject

    root = Path(subject.__file__).parents[subject.__name__.count(".") + 1]
    return functools.partial(run_python, PYTHONPATH=os.pathsep.join([str(tmp_path), str(root)]))
