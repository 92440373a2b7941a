# SPDX-License-Identifier: Apache-2.0
"""The choice between verl's classes and those of this package, with a stand-in for verl."""

import importlib
import importlib.metadata
import sys
import types

import pytest
import ray

import fairlead_verl
from fairlead_verl import VERSIONS, install

CLASSES = ("RayResourcePool", "SubRayResourcePool", "RayWorkerGroup")


@pytest.fixture
def verl(monkeypatch):
    """Return a maker of a stand-in for verl, which returns verl's module of worker groups."""

    def make(version):
        names = ("verl", "verl.single_controller", "verl.single_controller.ray", "verl.single_controller.ray.base")
        for name in names:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["verl"].__version__ = version
        for name in ("_pools", "_groups"):
            stand_in = types.ModuleType(name)
            stand_in.__dict__.update({one: type(one, (), {}) for one in CLASSES})
            monkeypatch.setitem(sys.modules, f"fairlead_verl.{name}", stand_in)
        return sys.modules[names[-1]]

    monkeypatch.delenv("FAIRLEAD_VERL", raising=False)
    return make


def test_version_equals_that_of_the_distribution():
    """The literal version and the installed metadata agree."""
    assert fairlead_verl.__version__ == importlib.metadata.version("fairlead-verl")


def test_entry_point():
    """verl finds the plug-in."""
    (found,) = importlib.metadata.entry_points(group="verl.plugins", name="fairlead")
    assert found.value == "fairlead_verl._plugin"


@pytest.mark.parametrize("version", VERSIONS)
def test_known_version(verl, version):
    """All three classes are replaced in both modules."""
    base = verl(version)
    assert install()
    for module in (base, sys.modules["verl.single_controller.ray"]):
        assert sorted(name for name in vars(module) if not name.startswith("__")) == sorted(CLASSES)
        # Pickles name verl's module.
        assert {getattr(module, name).__module__ for name in CLASSES} == {base.__name__}


@pytest.mark.parametrize(("mode", "said"), [(ray.SCRIPT_MODE, 1), (ray.WORKER_MODE, 0)])
def test_unknown_version(verl, monkeypatch, capsys, mode, said):
    """An unknown version keeps verl's classes, and the driver alone says so."""
    base = verl("9.9.9")
    context = types.SimpleNamespace(worker=types.SimpleNamespace(mode=mode))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert not install()
    assert not hasattr(base, "RayWorkerGroup")
    assert capsys.readouterr().err.count("this is verl 9.9.9: it uses its own worker groups") == said


def test_chosen(verl, monkeypatch):
    """FAIRLEAD_VERL decides: 1 replaces the classes of any version, 0 those of none."""
    monkeypatch.setenv("FAIRLEAD_VERL", "1")
    assert hasattr(verl("9.9.9"), "__name__")
    assert install()
    monkeypatch.setenv("FAIRLEAD_VERL", "0")
    base = verl(VERSIONS[0])
    assert not install()
    assert not hasattr(base, "RayWorkerGroup")


def test_failure_is_printed(verl, monkeypatch, capsys):
    """verl drops the error of a plug-in, so the plug-in prints it."""
    verl(VERSIONS[0])
    monkeypatch.delitem(sys.modules["fairlead_verl._groups"].__dict__, "RayWorkerGroup")
    monkeypatch.delitem(sys.modules, "fairlead_verl._plugin", raising=False)
    with pytest.raises(AttributeError):
        importlib.import_module("fairlead_verl._plugin")
    printed = capsys.readouterr().err
    assert "fairlead-verl failed, so verl uses its own worker groups here:" in printed
    assert "AttributeError" in printed
