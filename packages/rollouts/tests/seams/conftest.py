# SPDX-License-Identifier: Apache-2.0
"""The seams of frameworks: one module of each, without the rest of the framework."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

STUBS = ("PIL", "datasets", "pyarrow", "requests", "sglang", "sglang_router")


class BarePackages:
    """Import packages of a framework without running their `__init__`, which would import all of it."""

    def __init__(self, root, names):
        self.root, self.names = root, names

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        spec = importlib.util.spec_from_loader(name, self, is_package=True)
        spec.submodule_search_locations = [str(self.root.joinpath(*name.split(".")))]
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        pass


def import_seam(root, module):
    """Import a module below a folder. Packages above it stay bare, and libraries for data are replaced by stubs."""
    parts = module.split(".")
    names = {".".join(parts[:end]) for end in range(1, len(parts))} | {f"{parts[0]}.utils"}
    sys.meta_path.insert(0, BarePackages(root, names))
    for stub in STUBS:
        if importlib.util.find_spec(stub) is None:
            sys.modules[stub] = MagicMock(__spec__=None)
    return importlib.import_module(module)


@pytest.fixture(scope="session")
def verl_buffer():
    """The real module of verl's replay buffer, as installed."""
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed: `nox -s seams` installs it")
    for needed in ("transfer_queue", "tensordict", "omegaconf"):
        pytest.importorskip(needed)
    return import_seam(Path(spec.origin).parent.parent, "verl.trainer.ppo.v1.replay_buffer")


@pytest.fixture(scope="session")
def nemo_samplers():
    """The module of NeMo RL's samplers, from the folder of `nox -s seams -- --source FOLDER`."""
    return import_source("nemo_rl", "nemo_rl.algorithms.async_utils.staleness_sampler")


@pytest.fixture(scope="session")
def slime_source():
    """The module of slime's data source, from the same folder."""
    return import_source("slime", "slime.rollout.data_source")


def import_source(checkout, module):
    """Import a module of a checkout, or skip the test without one."""
    folder = os.environ.get("FAIRLEAD_SEAM_SOURCES")
    if not folder:
        pytest.skip("needs a checkout: `nox -s seams -- --source FOLDER`")
    return import_seam(Path(folder, checkout), module)
