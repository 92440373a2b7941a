# SPDX-License-Identifier: Apache-2.0
"""Import one module of a framework without the rest of it."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest


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
    """Import a module below a folder. Packages above it stay bare."""
    parts = module.split(".")
    names = {".".join(parts[:end]) for end in range(1, len(parts))} | {f"{parts[0]}.utils"}
    sys.meta_path.insert(0, BarePackages(root, names))
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


def source(name):
    """Return the checkout of a framework below the folder of `nox -s seams -- --source FOLDER`, or None."""
    folder = os.environ.get("FAIRLEAD_SEAM_SOURCES")
    return Path(folder, name) if folder else None
