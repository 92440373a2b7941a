# SPDX-License-Identifier: Apache-2.0
"""Conversions to and from the meshes of torch, and torch tensors as input, with the real torch if installed."""

import pytest

from fairlead_sharding import NamedSharding

PERMUTED = NamedSharding([[3, 1], [2, 0]], ["dp", "tp"])


@pytest.fixture
def process_group():
    """A fake torch process group of four ranks, of which this process is rank 0."""
    pytest.importorskip("torch", reason="needs torch")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason="needs torch's fake group")
    import torch.distributed as dist

    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_device_mesh(process_group):
    """A DeviceMesh has the same ranks, positions and names, and converts back."""
    mesh = PERMUTED.to_device_mesh("cpu")

    assert mesh.mesh.tolist() == PERMUTED.layout.tolist()
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert list(mesh.get_coordinate()) == [1, 1]
    assert NamedSharding.from_device_mesh(mesh) == PERMUTED


def test_device_mesh_without_names(process_group):
    """A mesh without names is refused."""
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
