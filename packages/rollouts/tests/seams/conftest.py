# SPDX-License-Identifier: Apache-2.0
"""The seams of frameworks: one module of each, without the rest of the framework."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Libraries and modules that seams import and do not call.
STUBS = ("PIL", "httpx", "miles.utils.chat_template_utils", "pyarrow", "sglang", "sglang_router", "transformers")


class Stub(ModuleType):
    """A module that has every member, each an empty class."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class SeamFinder:
    """Import packages of a framework without their `__init__`, which would import all of it, and stubs."""

    def __init__(self, root, names):
        self.root, self.names = root, names
        self.stubs = [one for one in STUBS if "." in one or importlib.util.find_spec(one) is None]

    def find_spec(self, name, path=None, target=None):
        if any(name == stub or name.startswith(f"{stub}.") for stub in self.stubs):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        if name not in self.names:
            return None
        spec = importlib.util.spec_from_loader(name, self, is_package=True)
        spec.submodule_search_locations = [str(self.root.joinpath(*name.split(".")))]
        return spec

    def create_module(self, spec):
        return None if spec.name in self.names else Stub(spec.name)

    def exec_module(self, module):
        pass


def import_seam(root, module):
    """Import a module below a folder."""
    parts = module.split(".")
    names = {".".join(parts[:end]) for end in range(1, len(parts))} | {f"{parts[0]}.utils"}
    sys.meta_path.insert(0, SeamFinder(root, names))
    return importlib.import_module(module)


def find_checkouts():
    """Return the folder of `nox -s seams -- --source FOLDER`, or skip the test without one."""
    folder = os.environ.get("FAIRLEAD_SEAM_SOURCES")
    if not folder:
        pytest.skip("needs a checkout: `nox -s seams -- --source FOLDER`")
    return Path(folder)


def import_source(checkout, module):
    """Import a module of a checkout."""
    return import_seam(find_checkouts() / checkout, module)


@pytest.fixture
def checkouts():
    """The folder with checkouts of slime and miles."""
    return find_checkouts()
