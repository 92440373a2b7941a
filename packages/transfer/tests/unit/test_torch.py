# SPDX-License-Identifier: Apache-2.0
"""What the ends of a link do with torch tensors and DTensors."""

import sys

import pytest

from fairlead_transfer._remote import end
from fairlead_transfer._remote.tensors import TorchLibrary

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
    ((name, reason),) = reply.refused
    assert name == "a"
    assert text in reason


def make_wrapper(inner):
    """Return a tensor that wraps another one, and has no memory of its own."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            def unwrap(value):
                return value.inner if isinstance(value, Wrapper) else value

            if function is torch.ops.aten.detach.default:
                return Wrapper(args[0].inner.detach())
            return function(*map(unwrap, args), **(kwargs or {}))

    return Wrapper(inner)


def make_asynchronous(tensor):
    """Return what a collective returns that has not been waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor)


def free(tensor):
    """Free the storage of a tensor, as FSDP2 does with a gathered parameter."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("make", [make_wrapper, make_asynchronous, free])
@pytest.mark.parametrize("side", ["source", "target"])
def test_memory_without_an_address(make, side):
    """A tensor whose memory cannot be addressed is refused by name; one that a collective returns is waited for."""
    value = make(torch.ones(4))
    workers = {"source": Worker({"a": torch.ones(4)}), "target": Worker({"a": torch.zeros(4)})}
    workers[side].tensors = {"a": value}
    (source,), (target,) = Ends([workers["source"]], [workers["target"]]).describe()
    refused = [name for name, _ in {"source": source, "target": target}[side].refused]
    assert refused == ([] if make is make_asynchronous else ["a"])


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_lazy_values(kind):
    """What arrives are the values of a tensor, also if its memory holds their conjugates or negatives."""
    value = torch.arange(4.0)
    value = torch.complex(value, value + 1).conj() if kind == "conjugate" else torch._neg_view(value)
    target = Worker({"a": torch.zeros(4, dtype=value.dtype)})
    ends = Ends([Worker({"a": value})], [target])
    ends.plan()
    (fetched,) = ends.fetch(ends.stage(), 1)
    assert fetched.outcome == "done"
    ends.commit(1)
    assert torch.equal(target.tensors["a"], value)


def test_gathered_parameters(as_rank):
    """A target whose parameters FSDP2 has gathered is refused; after a reshard, the weights arrive and stay."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    as_rank(0, 1)
    model = fully_shard(torch.nn.Linear(4, 3), mesh=init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        model(torch.zeros(1, 4))
    target = Worker({name: one.detach() for name, one in model.named_parameters()})
    sent = {"weight": torch.full((3, 4), 7.0), "bias": torch.full((3,), 7.0)}
    ends = Ends([Worker(sent)], [target])
    assert [name for name, why in ends.refuse() if "call model.reshard()" in why] == ["weight", "bias"]
    model.reshard()
    target.tensors = dict(model.named_parameters())
    ends.send(1)
    with torch.no_grad():
        assert bool((model(torch.ones(1, 4)) == 5 * 7).all())
    model.reshard()
    assert all(bool((one.to_local() == 7).all()) for one in model.parameters())


@pytest.mark.parametrize("kind", ["expanded", "overlapping"])
def test_targets_whose_elements_share_memory(kind):
    """A target tensor whose elements overlap is refused by name before anything is decided."""
    base = torch.zeros(6)
    value = base[:1].expand(4) if kind == "expanded" else base.as_strided((2, 4), (2, 1))
    refused = Ends([Worker({"a": torch.ones_like(value)})], [Worker({"a": value})]).refuse()
    assert [name for name, _ in refused] == ["a"]


def test_inference_tensors():
    """Tensors that were made in inference mode are written."""
    with torch.inference_mode():
        target = Worker({"a": torch.zeros(4)})
    ends = Ends([Worker({"a": torch.ones(4)})], [target])
    ends.plan()
    ends.fetch(ends.stage(), 1)
    (reply,) = ends.commit(1)
    assert not reply.error
    assert target.tensors["a"].tolist() == [1] * 4


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
            _, dtype, _, shape, offsets, sizes = describe(tensor)
            assert (dtype, shape) == ("float32", (8, 6))
            box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            assert torch.equal(value[box], tensor.to_local())
            seen[box] = 1
        assert seen.all()


@pytest.mark.parametrize("kind", ["partial", "uneven", "strided"])
def test_dtensors_that_are_no_boxes(as_rank, kind):
    """Partial placements, strided shards whose parts are not adjacent, and parts of other sizes are refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    as_rank(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements, rows, text = {
        "partial": ((Partial(), Replicate()), 8, "artial"),
        "uneven": ((_StridedShard(0, split_factor=2), Shard(0)), 10, "not one box"),
        "strided": ((Shard(0), _StridedShard(0, split_factor=2)), 8, "several boxes"),
    }[kind]
    tensor = DTensor.from_local(
        torch.ones(2, 3), mesh, placements, run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
    )
    (reply,), _ = Ends([Worker({"a": tensor})], [Worker({})]).describe()
    ((_, reason),) = reply.refused
    assert text in reason


@pytest.mark.parametrize("expected", [[(0, 3), (5, 3), (3, 2), (8, 2)], [(0, 2), (4, 2), (2, 2), (6, 1)]])
def test_boxes_of_uneven_shards_over_tensor_parallelism(as_rank, expected):
    """FSDP2 cuts the rows of each tensor parallel rank as torch chunks them; each rank holds one box."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from fairlead_transfer._remote.tensors import describe

    # Of ten rows, each of two tensor parallel ranks has five, of which one FSDP2 rank has three and the other two.
    boxes, shape = [], torch.Size((expected[-1][0] + expected[-1][1], 3))
    for rank in range(4):
        as_rank(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = torch.ones(expected[rank][1], 3)
        placements = _StridedShard(0, split_factor=2), Shard(0)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(3, 1))
        _, _, _, _, offsets, sizes = describe(tensor)
        boxes.append((offsets[0], sizes[0]))
    assert boxes == expected


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


def test_gpus_are_waited_for(monkeypatch):
    """What methods have left to a GPU is done before tensors are read or overwritten, and copies before the reply."""
    events = []

    class Busy(Worker):
        def weights(self):
            events.append("weights")
            return self.tensors

        def note(self):
            events.append("note")

    monkeypatch.setattr(end, "finish", lambda tensors: events.append("finished"))
    monkeypatch.setattr(TorchLibrary, "copy", lambda self, to, value: events.append("copied"))
    ends = Ends([Busy({"a": torch.ones(4)})], [Busy({"a": torch.zeros(4)})])
    ends.plan()
    staged = ends.stage(compares=False)
    # That of the source runs again when it is staged.
    assert events == ["weights"] * 3 + ["finished", "copied"]
    ends.fetch(staged, 1)
    assert events[5:] == ["weights"]  # the target may return copies
    events.clear()
    ends.commit(1, before="note", after="note")
    assert events == ["note", "weights", "finished", "copied", "finished", "note"]
