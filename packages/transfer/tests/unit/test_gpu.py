# SPDX-License-Identifier: Apache-2.0
"""What the ends of a link do with tensors on a GPU; skipped without one."""

import itertools

import pytest

from ..ends import Ends

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

GPU = "cuda:0"
SHAPE = 6, 1 << 15
# Clock cycles of a GPU that take about a tenth of a second.
CYCLES = 2 * 10**8


class Worker:
    """Holds tensors."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.seen = None

    def weights(self):
        return self.tensors

    def read_on_another_stream(self):
        """Read the first tensor without waiting for the stream on which it was written."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.seen = next(iter(self.tensors.values())).clone()
        stream.synchronize()

    def busy(self):
        """Leave the current stream with work to do."""
        torch.cuda._sleep(CYCLES)


def values(dtype="float32", device=GPU, shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape, generator=generator) * 200 - 100).to(getattr(torch, dtype)).to(device)


def same(one, other):
    """Return whether two tensors have the same bits."""
    return torch.equal(*(tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def close(ends):
    for (side, rank), end in ends.ends.items():
        end.serve(ends.workers[side][rank], "close", ())


def deliver(source, target, **options):
    """Send the tensors of one worker to another, and return what it holds then."""
    ends = Ends([source], [target], **options)
    ends.send(1)
    close(ends)
    return target.tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn", "complex64"])
def test_dtypes(dtype):
    """Tensors of every dtype arrive bit by bit, large ones, small ones and scalars."""
    value = values(dtype)
    held = deliver(
        Worker(w=value, small=value[:, :3].contiguous(), step=value[0, 0].clone()),
        Worker(w=torch.zeros_like(value), small=torch.zeros_like(value[:, :3]), step=torch.zeros_like(value[0, 0])),
    )
    assert same(held["w"], value)
    assert same(held["small"], value[:, :3])
    assert same(held["step"], value[0, 0])


VIEWS = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "rows": lambda tensor: torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]],
    "conjugate": lambda tensor: torch.complex(tensor, tensor).conj(),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(VIEWS, ["whole", "transposed", "strided", "rows"]))
)
def test_strides(source, target):
    """Tensors that are not in one piece of memory are read and written where they are."""
    value = VIEWS[source](values())
    into = VIEWS[target](torch.zeros(SHAPE, dtype=value.dtype, device=GPU))
    deliver(Worker(w=value), Worker(w=into))
    assert same(into, value.detach().resolve_conj())


@pytest.mark.parametrize(("source", "target"), [(GPU, "cpu"), ("cpu", GPU)])
def test_other_devices(source, target):
    """One side may hold its tensors in host memory."""
    value, into = values("bfloat16", source), torch.zeros(SHAPE, dtype=torch.bfloat16, device=target)
    deliver(Worker(w=value), Worker(w=into))
    assert same(into, value)


def test_casts():
    """A tensor is cast on the GPU before it travels."""
    value, into = values(), torch.zeros(SHAPE, device=GPU)
    deliver(Worker(w=value), Worker(w=into), dtype="bfloat16")
    assert same(into, value.bfloat16().float())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_source_is_still_computed(dtype):
    """What a method has left to another stream is done before its tensors are read or packed."""
    value, stream = torch.zeros(SHAPE, device=GPU), torch.cuda.Stream()

    class Trainer(Worker):
        def weights(self):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                value.fill_(3)
            return self.tensors

    held = deliver(Trainer(w=value), Worker(w=torch.zeros(SHAPE, device=GPU)), dtype=dtype)
    assert same(held["w"], torch.full(SHAPE, 3.0))


def test_commit_is_complete():
    """When the version has been committed, every stream sees it."""
    target = Worker(w=torch.zeros(SHAPE, device=GPU))
    ends = Ends([Worker(w=values())], [target])
    ends.send(1, before="busy", after="read_on_another_stream")
    assert same(target.seen, values())
    close(ends)


def test_target_is_still_read():
    """What a method has left to another stream reads the old version, not a mixture with the new one."""
    into, stream, seen = torch.zeros(SHAPE, device=GPU), torch.cuda.Stream(), []

    class Generator(Worker):
        def begin(self):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                seen.append(into.clone())

    ends = Ends([Worker(w=values())], [Generator(w=into)])
    ends.send(1, before="begin")
    torch.cuda.synchronize()
    assert not seen[0].any()
    assert same(into, values())
    close(ends)
