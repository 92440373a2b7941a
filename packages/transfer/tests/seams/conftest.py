# SPDX-License-Identifier: Apache-2.0
"""The modules of frameworks with the base classes of checkpoint engines, without the rest of the framework."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "rollouts/tests/seams/conftest.py"


@pytest.fixture(scope="session")
def seams():
    """The functions that import one module of a framework, which the tests of fairlead-rollouts have."""
    if not SHARED.is_file():
        pytest.skip("the tests of fairlead-rollouts are not here: `nox -s seams` runs both")
    spec = importlib.util.spec_from_file_location("fairlead_seams", SHARED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def verl_base(seams):
    """The real module `verl.checkpoint_engine.base`, as installed; what it imports for workers is a stub."""
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed: `nox -s seams` installs it")
    for needed in ("tensordict", "omegaconf"):
        pytest.importorskip(needed)
    finder = seams.SeamFinder(Path(spec.origin).parent.parent, {"verl", "verl.checkpoint_engine", "verl.utils"})
    finder.stubs = ["verl.workers", "codetiming"]
    sys.meta_path.insert(0, finder)
    return importlib.import_module("verl.checkpoint_engine.base")


@pytest.fixture(scope="session")
def nemo_base(seams):
    """The module `nemo_rl.utils.checkpoint_engines.base`, from the folder of `nox -s seams -- --source FOLDER`."""
    return seams.import_source("nemo_rl", "nemo_rl.utils.checkpoint_engines.base")
