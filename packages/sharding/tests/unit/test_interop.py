# SPDX-License-Identifier: Apache-2.0
"""Conversions to the meshes of torch and jax, without these libraries."""

import builtins
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fairlead_sharding import NamedSharding

PERMUTED = NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])


@pytest.fixture
def recorded_mesh(monkeypatch):
    """A stand-in for jax whose Mesh keeps its arguments, because few machines have four devices."""
    jax_sharding = SimpleNamespace(Mesh=lambda devices, names: SimpleNamespace(devices=devices, names=names))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(sharding=jax_sharding))
    monkeypatch.setitem(sys.modules, "jax.sharding", jax_sharding)


def test_jax_mesh_places_devices_by_rank(recorded_mesh):
    """Each coordinate has the device of its rank, even if devices look like sequences."""
    devices = [("device", rank) for rank in range(4)]
    mesh = PERMUTED.to_jax_mesh(devices)

    assert mesh.names == ("dp", "tp")
    assert mesh.devices.shape == (2, 2)
    assert mesh.devices[0, 0] == ("device", 3)
    assert mesh.devices[1, 1] == ("device", 0)
    assert PERMUTED.at(dp=1).to_jax_mesh(np.arange(4)).devices.tolist() == [2, 0]


def test_jax_mesh_with_too_few_devices(recorded_mesh):
    """A rank without a device is named."""
    with pytest.raises(ValueError, match="Rank 3 has no device: only 2 devices were given"):
        PERMUTED.to_jax_mesh(["a", "b"])


@pytest.mark.parametrize(
    ("library", "convert"),
    [("torch", lambda: PERMUTED.to_device_mesh("cpu")), ("jax", lambda: PERMUTED.to_jax_mesh([1, 2, 3, 4]))],
)
def test_missing_library(library, convert, monkeypatch):
    """Without the library the error names the method and the command to install it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    # Python refuses to import a module that is None in sys.modules.
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ImportError, match=rf"to_\w+\(\) needs {library}, .*: pip install {library}") as caught:
        convert()
    assert caught.value.name == library
    assert isinstance(caught.value.__cause__, builtins.ImportError)
