# SPDX-License-Identifier: Apache-2.0
"""Conversions to the meshes of torch and jax, with the real libraries where they are installed."""

import builtins
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import fairlead_sharding
from fairlead_sharding import NamedSharding

PERMUTED = NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])


@pytest.fixture
def process_group():
    """A torch process group of four, of which the other three are made up."""
    pytest.importorskip("torch", reason="needs torch")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason="needs torch's fake group")
    import torch.distributed as dist

    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_device_mesh(process_group):
    """A DeviceMesh has the same ranks, in the same places, under the same names; and back."""
    mesh = PERMUTED.to_device_mesh("cpu")

    assert mesh.mesh.tolist() == PERMUTED.layout.tolist()
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert list(mesh.get_coordinate()) == [1, 1]
    assert NamedSharding.from_device_mesh(mesh) == PERMUTED


def test_device_mesh_without_names(process_group):
    """A mesh without names has no axes to speak of."""
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.raises(ValueError, match=r"no dimension names; make it with mesh_dim_names="):
        NamedSharding.from_device_mesh(init_device_mesh("cpu", (2, 2)))


def test_torch_tensors():
    """A tensor can be a layout, and the pieces of a plan along its dims."""
    torch = pytest.importorskip("torch", reason="needs torch")

    assert NamedSharding(torch.tensor([[3, 1], [2, 0]]), ["dp", "tp"]) == PERMUTED
    with pytest.raises(ValueError, match="only integer rank IDs, got an array of bool"):
        NamedSharding(torch.tensor([True, False]), ["dp"])
    with pytest.raises(ValueError, match="Could not create NumPy array from layout"):
        NamedSharding(torch.ones(2, requires_grad=True), ["dp"])

    plan = PERMUTED.plan(["dp", "tp"])
    pieces = plan.pieces(torch.arange(8).reshape(2, 2, 2))
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match=r"depth 1, axis 'tp' \(pieces\[0\]\): expected 2, found 3"):
        plan.pieces(torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"at depth 1, axis 'tp' \(pieces\[0\]\), found a Tensor"):
        plan.pieces(torch.zeros(2))


def test_jax_mesh(run_python):
    """Rank r is device r; here on four devices that jax makes out of one processor."""
    pytest.importorskip("jax", reason="needs jax")
    script = f"""
        import importlib, jax
        sharding = importlib.import_module({fairlead_sharding.__name__!r})
        grid = sharding.NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])
        mesh = grid.to_jax_mesh(jax.devices())
        assert isinstance(mesh, jax.sharding.Mesh)
        print(dict(mesh.shape), [device.id for device in mesh.devices.flat])
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}

    assert run_python(script, **flags).strip() == "{'dp': 2, 'tp': 2} [3, 1, 2, 0]"


@pytest.fixture
def recorded_mesh(monkeypatch):
    """A stand-in for jax whose Mesh keeps what it is given: a machine has seldom four devices."""
    jax_sharding = SimpleNamespace(Mesh=lambda devices, names: SimpleNamespace(devices=devices, names=names))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(sharding=jax_sharding))
    monkeypatch.setitem(sys.modules, "jax.sharding", jax_sharding)


def test_jax_mesh_places_devices_by_rank(recorded_mesh):
    """The device at each coordinate is that of the rank there, even if devices look like sequences."""
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
    """Without the library the error says who needs it and how to get it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    # None in sys.modules is Python's own way to say that a module cannot be imported.
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ImportError, match=rf"to_\w+\(\) needs {library}, .*: pip install {library}") as caught:
        convert()
    assert caught.value.name == library
    assert isinstance(caught.value.__cause__, builtins.ImportError)
