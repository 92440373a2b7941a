# SPDX-License-Identifier: Apache-2.0
"""Import a few modules at their first use, in all processes of an environment of nox.

Each worker of Ray imports Ray, which is most of what its start costs. A third of that goes to modules that the workers
of tests do not use. The first access to an attribute of such a module imports it, and so does importing a part of it.
"""

import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

DEFERRED = {"jsonschema", "requests", "yaml"}
LOCK = threading.RLock()


class Deferred(ModuleType):
    """A module that has not been executed yet."""

    def __getattr__(self, name: str) -> object:
        execute(self)
        return ModuleType.__getattribute__(self, name)


def execute(module: ModuleType) -> None:
    """Execute a module, if it has not been executed yet. Other threads wait until it is complete."""
    with LOCK:
        if (spec := module.__spec__).loader is Finder:
            spec.loader = module.__loader__ = spec.loader_state
            try:
                spec.loader.exec_module(module)
            except BaseException:  # Ctrl-C too: the next access tries again, as the next import would.
                spec.loader = module.__loader__ = Finder
                raise
            module.__class__ = ModuleType


class Finder:
    """Finds the modules in `DEFERRED`, and defers their execution."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the specification of a deferred module, or of one that the execution of its package has imported."""
        if name not in DEFERRED:
            package = sys.modules.get(name.partition(".")[0])
            if type(package) is Deferred:
                execute(package)
                if name in sys.modules:
                    return ModuleSpec(name, Imported(sys.modules.pop(name)))
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader_state, spec.loader = spec.loader, Finder
        return spec

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let Python create the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Leave the module empty until it is used."""
        module.__class__ = Deferred


class Imported:
    """Loads a module that has been imported since Python looked for it."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create a module, which is then discarded."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that has been imported back in its place."""
        sys.modules[module.__name__] = self._module


sys.meta_path.insert(0, Finder)
