# SPDX-License-Identifier: Apache-2.0
"""What the ends of a link do with torch tensors and DTensors."""

import sys

import pytest

from ..ends import Ends

torch = pytest.importorskip("torch", reason="needs torch")


class Worker:
    """Holds tensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def weights(self):
        return self.tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"])
def test_dtypes(dtype):
    """Tensors of dtypes that numpy lacks arrive bit by bit, also into transposed memory and parameters."""
    value = (torch.arange(24) % 7).reshape(4, 6).to(getattr(torch, dtype))
    transposed = torch.zeros((6, 4), dtype=value.dtype).T
    target = Worker({"a": transposed, "step": torch.zeros((), dtype=value.dtype)})
    Ends([Worker({"a": value, "step": value[1, 0]})], [target]).send(1)
    assert torch.equal(transposed.to(torch.float32), value.to(torch.float32))
    assert target.tensors["step"] == value[1, 0]


def test_parameters_and_casts():
    """Parameters are overwritten in place, without a gradient, and cast at the source."""
    model = torch.nn.Linear(4, 3)
    other = torch.nn.Linear(4, 3).to(torch.float32)
    before = other.weight.data_ptr()
    ends = Ends([Worker(dict(model.named_parameters()))], [Worker(dict(other.named_parameters()))], dtype="bfloat16")
    assert ends.send(1) == (12 + 3) * 2
    assert torch.equal(other.weight, model.weight.to(torch.bfloat16).to(torch.float32))
    assert other.weight.data_ptr() == before
    assert other.weight.grad is None


def test_from_numpy_to_torch():
    """The source may hold numpy arrays and the target torch tensors."""
    numpy = pytest.importorskip("numpy")
    target = Worker({"a": torch.zeros(4)})
    Ends([Worker({"a": numpy.arange(4, dtype="float32")})], [target]).send(1)
    assert target.tensors["a"].tolist() == [0, 1, 2, 3]


def test_without_numpy(monkeypatch):
    """torch tensors travel in a worker without numpy, and their storage can still be resized, as FSDP2 does."""

    def fail(tensor):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", fail)
    value = torch.arange(600_000, dtype=torch.bfloat16)
    target = Worker({"a": torch.zeros(600_000, dtype=torch.bfloat16)})
    Ends([Worker({"a": value})], [target]).send(1)
    assert torch.equal(target.tensors["a"], value)
    assert value.untyped_storage().resizable()
    assert target.tensors["a"].untyped_storage().resizable()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2).to_sparse(), "only dense"),
        (torch.ones(2, device="meta"), "only dense"),
    ],
)
def test_what_cannot_travel(value, text):
    """Sparse and meta tensors are refused by name."""
    (reply,), _ = Ends([Worker({"a": value})], [Worker({})]).describe()
    ((name, reason),) = reply["refused"]
    assert name == "a"
    assert text in reason


@pytest.fixture
def as_rank():
    """Return a function that makes this process a rank of a process group that moves nothing."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist = torch.distributed

    def make(rank, world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world_size)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_boxes_of_dtensors(as_rank):
    """The chunk list of a DTensor gives its box, also for uneven shards and FSDP2 on top of tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from fairlead_transfer._remote.tensors import describe

    value = torch.arange(8 * 6.0).reshape(8, 6)
    for placements in (
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(1), Replicate()),
    ):
        seen = torch.zeros(8, 6)
        for rank in range(4):
            as_rank(rank, 4)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            tensor = distribute_tensor(value, mesh, placements, src_data_rank=None)
            assert isinstance(tensor, DTensor)
            _, dtype, _, shape, offsets, sizes, _ = describe(tensor)
            assert (dtype, shape) == ("float32", (8, 6))
            box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            assert torch.equal(value[box], tensor.to_local())
            seen[box] = 1
        assert seen.all()


@pytest.mark.parametrize("kind", ["partial", "uneven", "strided"])
def test_dtensors_that_are_no_boxes(as_rank, kind):
    """Partial placements, and strided shards whose parts are not adjacent, are refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    as_rank(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements, rows, text = {
        "partial": ((Partial(), Replicate()), 8, "artial"),
        "uneven": ((_StridedShard(0, split_factor=2), Shard(0)), 7, "several boxes"),
        "strided": ((Shard(0), _StridedShard(0, split_factor=2)), 8, "several boxes"),
    }[kind]
    tensor = DTensor.from_local(
        torch.ones(2, 3), mesh, placements, run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
    )
    (reply,), _ = Ends([Worker({"a": tensor})], [Worker({})]).describe()
    ((_, reason),) = reply["refused"]
    assert text in reason


def test_fingerprint_is_stable():
    """In-place updates do not change the fingerprint; another storage, shape or dtype does."""
    from fairlead_transfer._remote.tensors import look

    value = torch.zeros(4)
    mark = look(value)[0]
    value += 1
    assert look(value)[0] == mark
    assert look(value.clone())[0] != mark
    assert look(value.view(2, 2))[0] != mark
    assert look(value.view(torch.int32))[0] != mark


def test_torch_is_not_imported_for_numpy(tmp_path):
    """An end that sees numpy arrays only does not import torch."""
    import subprocess

    script = (
        "import sys, numpy as np\n"
        "from fairlead_transfer._remote.tensors import describe, library, look\n"
        "describe(np.ones(3)); library('numpy').empty((2,), 'float32')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=tmp_path)
