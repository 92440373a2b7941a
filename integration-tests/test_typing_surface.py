# SPDX-License-Identifier: Apache-2.0
"""Tests that `typing_tests`, where types are checked, uses every public name."""

import ast
import importlib
import inspect
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/src/*/__init__.py"))}
MODULES = [
    pytest.param(package, module, id=".".join([package, *module.split()]))
    for package, folder in FOLDERS.items()
    for module in ["", *sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))]
]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def exported(package: str, module: str) -> set[str]:
    """Return the `__all__` of a module without importing it, because some modules need torch."""
    for statement in parse(FOLDERS[package] / f"{module or '__init__'}.py").body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return set(ast.literal_eval(statement.value))
    raise AssertionError(f"{package}.{module} has no __all__")


def usage(package: str) -> ast.Module:
    return parse(ROOT / "typing_tests" / f"{package.removeprefix('fairlead_')}.py")


def used_members(tree: ast.AST) -> set[str]:
    """Return the names of all members that code uses: `value.name`, and `value["name"]` of a TypedDict."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keys = {node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    return attributes | {key.value for key in keys if isinstance(key, ast.Constant)}


def members(cls: type) -> set[str]:
    """Return the public methods, properties and attributes of a class, including attributes that its methods set."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("fairlead_"):
            source = ast.parse(textwrap.dedent(inspect.getsource(base)))
            stored = [node for node in ast.walk(source) if isinstance(node, ast.Attribute)]
            found |= {*vars(base), *inspect.get_annotations(base)}
            found |= {one.attr for one in stored if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"}
    return {name for name in found if not name.startswith("_")}


def test_every_package_has_a_file():
    """Each package has one file in `typing_tests`, and each file belongs to a package."""
    files = {f"fairlead_{path.stem}" for path in ROOT.glob("typing_tests/[!_]*.py")}
    assert files == set(FOLDERS)


@pytest.mark.parametrize(("package", "module"), MODULES)
def test_every_public_name_is_used(package, module):
    """The file of a package imports and uses every name that its public modules export."""
    tree = usage(package)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in (package, f"{package}.{module}".rstrip("."))
        for alias in node.names
    }
    used = names & imported
    through_modules = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (package, *used & {module})
    }
    assert exported(package, module) - used - through_modules == set()


@pytest.mark.parametrize(("package", "module"), MODULES)
def test_every_public_member_is_used(package, module):
    """The file of a package uses every public method, property and attribute of the exported classes."""
    if module == "torch":
        pytest.importorskip("torch", reason="the torch helpers need torch")
    found = importlib.import_module(f"{package}.{module}".rstrip("."))
    classes = [getattr(found, name) for name in exported(package, module)]
    used = used_members(usage(package))
    missing = {f"{cls.__name__}.{name}" for cls in classes if inspect.isclass(cls) for name in members(cls) - used}
    assert missing == set()
