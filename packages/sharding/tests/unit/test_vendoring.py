# SPDX-License-Identifier: Apache-2.0
"""The package can be copied into another one, where it needs numpy and nothing else."""

import ast
import io
import os
import shutil
import sys
import tokenize
from pathlib import Path

import pytest

import fairlead_sharding

SOURCE = Path(fairlead_sharding.__file__).parent
MODULES = sorted(SOURCE.glob("*.py"))
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


@each_module
def test_imports(module, read_imports):
    """Imports are relative, of the standard library, or of numpy."""
    assert read_imports(module) <= {*sys.stdlib_module_names, "numpy"}


@each_module
def test_package_name_does_not_occur(module):
    """No string, comment or name contains the package's name, because a copy has another name."""
    assert "fairlead" not in module.read_text(encoding="utf-8").lower()


@each_module
def test_nothing_is_read_at_import_time(module):
    """The modules that read the environment, files or metadata are not imported."""
    code = module.read_text(encoding="utf-8")
    names = {
        token.string for token in tokenize.generate_tokens(io.StringIO(code).readline) if token.type == tokenize.NAME
    }
    assert not names & {"os", "environ", "pathlib", "open", "metadata", "resources", "pkgutil", "logging"}


@each_module
def test_python_310_syntax(module):
    """The syntax is that of Python 3.10, because packages with a copy may support it."""
    ast.parse(module.read_text(encoding="utf-8"), feature_version=(3, 10))


@each_module
def test_licence(module):
    """Each file names its licence."""
    assert module.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_size():
    """Small enough to be copied: three files of under 1,000 lines, with no file of 500 or more."""
    lengths = [len(module.read_text(encoding="utf-8").splitlines()) for module in MODULES]

    assert len(lengths) == 3
    assert sum(lengths) < 1000
    assert max(lengths) < 500


def test_works_without_ray_torch_and_jax(run_python):
    """The package, except for the conversion to torch, works without ray, torch and jax, and imports none of them."""
    script = f"""
        import importlib, pickle, sys
        sharding = importlib.import_module({fairlead_sharding.__name__!r})
        grid = sharding.NamedSharding.from_shape(dp=2, tp=4)
        plan = pickle.loads(pickle.dumps(grid)).plan("dp", "tp", "tp")
        plan.pieces([1, 2]), plan.explain(), grid.render(), grid.groups("dp")
        try:
            grid.to_device_mesh("cpu")
        except ImportError as error:
            assert "pip install" in str(error), error
        else:
            raise AssertionError("the library was not blocked")
        print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"ray", "torch", "jax"}}))
    """
    assert run_python(script, block=["ray", "torch", "jax"]).strip() == "[]"


def test_import_is_light(run_python):
    """Importing the package does not import torch, jax or ray, even if they are installed."""
    script = f"""
        import importlib, sys
        importlib.import_module({fairlead_sharding.__name__!r}).NamedSharding.from_shape(dp=2).plan("dp")
        print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"ray", "torch", "jax", "logging"}}))
    """
    assert run_python(script).strip() == "[]"


needs_original = pytest.mark.skipif("SHARDING_UNDER_TEST" in os.environ, reason="this is the run of the copy")


@pytest.fixture
def host(tmp_path):
    """A folder with a package `host` that has vendored this one under another name."""
    vendor = tmp_path / "host" / "_vendor"
    shutil.copytree(SOURCE, vendor / "sharding", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "host" / "__init__.py").touch()
    (vendor / "__init__.py").touch()
    return tmp_path


@needs_original
def test_copy(host, run_python):
    """A copy imports, plans and pickles under its own name, and reads what the original wrote."""
    data = fairlead_sharding.NamedSharding([[3, 1], [2, 0]], ["dp", "tp"]).to_dict()
    script = f"""
        import pickle, sys
        from host._vendor.sharding import NamedSharding
        grid = NamedSharding.from_dict({data!r})
        plan = grid.plan("dp", "tp", "tp")
        pickled = pickle.dumps((grid, plan))
        assert b"host._vendor.sharding" in pickled and b"fairlead" not in pickled
        assert pickle.loads(pickled) == (grid, plan)
        assert "fairlead_sharding" not in sys.modules
        print(NamedSharding.__module__, plan.returned.tolist())
    """
    assert run_python(script, block=["fairlead_sharding"]) == "host._vendor.sharding._sharding [2, 3]\n"
