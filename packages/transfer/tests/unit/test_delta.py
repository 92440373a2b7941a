# SPDX-License-Identifier: Apache-2.0
"""What has changed in tensors, as it travels: positions, elements and bytes."""

import importlib.util
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_transfer._remote import delta
from fairlead_transfer._remote.delta import Base, Unpatched, fetch_patches
from fairlead_transfer._remote.staging import Context
from fairlead_transfer._remote.tensors import library

DTYPES = "uint8", "bool", "float16", "float32", "int64", "complex64", "complex128"
STORED = []


@pytest.fixture(autouse=True)
def stored(monkeypatch):
    """Store values in a list, as they come out of Ray's object store: buffers that cannot be written."""
    STORED.clear()

    def put(value):
        patches, *buffers = value
        STORED.append([patches, *(memoryview(buffer).toreadonly() for buffer in buffers)])
        return len(STORED) - 1

    monkeypatch.setattr(delta.ray, "put", put)
    monkeypatch.setattr(delta, "fetch_stored", lambda ref, deadline: STORED[ref])


class Pair:
    """The tensors of one source rank, and those of one target rank that holds the same."""

    def __init__(self, tensors, target, name="numpy", in_blocks=False):
        self.tools, self.tensors, self.target = library(name), tensors, target
        pieces = [
            (at, (slice(None),) * value.ndim if value.ndim else (slice(0, 1),)) for at, value in enumerate(tensors)
        ]
        dtypes = [self.tools.dtype_name(value) for value in tensors]
        self.orders = {"id": 1, "dtypes": dtypes, "names": list(map(str, range(len(tensors))))}
        self.sent = {**self.orders, "channels": [{"pieces": pieces}]}
        self.ordered = [(at, box, at, None) for at, box in pieces]
        self.base, self.epoch, self.in_blocks = Base(), 0, in_blocks
        self.base.keep(self.read(), 0, in_blocks)

    def read(self):
        return Context(self.tools, self.sent, self.tensors, {})

    def send(self, verify=False):
        """Bring the changes to the target; return the bytes that travelled, and the part that has changed."""
        assert not self.base.explain_whole(self.sent, self.epoch, self.in_blocks)
        self.epoch += 1
        (channel,) = self.base.stage(self.read(), self.epoch, verify)
        context = Context(self.tools, self.orders, self.target, {})
        saved, pieces, changes = fetch_patches(context, channel, self.ordered, 0.0)
        for at, box, value in pieces:
            self.tools.copy(self.target[at][box] if self.target[at].ndim else self.target[at].reshape(1), value)
        for at, box, where, values, _ in changes:
            to = self.target[at][box] if self.target[at].ndim else self.target[at].reshape(1)
            self.tools.scatter(to, where, values, self.orders["dtypes"][at])
        whole = sum(value.nbytes for value in self.tensors)
        assert channel["bytes"] == whole - saved
        changed, elements = channel["counts"]
        assert elements == sum(value.size if hasattr(value, "strides") else value.numel() for value in self.tensors)
        return channel["bytes"], changed / max(1, elements)


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.booleans())
def test_any_change_arrives(seed, dtype, in_blocks):
    """Random elements, runs and rows change; afterwards the target has the same bits, also those of NaN and -0.0."""
    rng, chance = np.random.default_rng(seed), random.Random(seed)
    shapes = [(chance.randrange(70), chance.randrange(90)), (), (chance.randrange(5000),), (0, 3)]
    source = [np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype) for shape in shapes]
    source = [value.reshape(shape).copy() for value, shape in zip(source, shapes, strict=True)]
    # One target is strided, as a transposed weight is.
    target = [value.copy() for value in source]
    target[0] = np.asfortranarray(target[0])
    pair = Pair(source, target, in_blocks=in_blocks)
    for _ in range(4):
        for value in source:
            flat = value.reshape(-1)
            density = chance.choice([0.0, 0.001, 0.05, 0.9])
            where = np.flatnonzero(rng.random(flat.size) < density)
            if chance.random() < 0.3 and flat.size:
                begin = chance.randrange(flat.size)
                where = np.arange(begin, min(flat.size, begin + chance.randrange(1, 600)))
            new = np.frombuffer(rng.bytes(len(where) * flat.itemsize), flat.dtype)
            flat[where] = new
        pair.send(verify=chance.random() < 0.5)
        assert [one.tobytes() for one in target] == [one.tobytes() for one in source]


@pytest.mark.parametrize(("density", "limit"), [(0.03, 0.08), (0.0005, 0.003), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bytes(density, limit, dtype):
    """Random elements that have changed take few bytes beside their own."""
    rng = np.random.default_rng(0)
    source = [np.zeros(1 << 20, dtype)]
    pair = Pair(source, [one.copy() for one in source])
    source[0][rng.random(1 << 20) < density] = 1
    size, found = pair.send()
    assert found == pytest.approx(density, rel=0.1)
    assert size <= limit * source[0].nbytes


def test_rows():
    """Rows that have changed, as of an embedding, travel as runs: positions take a hundredth of their bytes."""
    source = [np.zeros((1000, 512), "float16")]
    pair = Pair(source, [one.copy() for one in source])
    source[0][::50] = 1
    size, found = pair.send()
    assert found == 0.02
    assert size <= 1.01 * 0.02 * source[0].nbytes


def test_blocks():
    """Digests of blocks need no copy; a block that has changed travels as a whole, also the last and shorter one."""
    source = [np.zeros(10 * delta.BLOCK + 7, "float32")]
    pair = Pair(source, [source[0].copy()], in_blocks=True)
    source[0][[5, 6, -1]] = 1
    size, found = pair.send()
    assert size == (delta.BLOCK + 7) * 4 + 2
    assert found == pytest.approx(2 / 10, rel=0.1)
    assert pair.send() == (0, 0.0)
    assert np.array_equal(pair.target[0], source[0])


@pytest.mark.parametrize("verify", [False, True])
def test_a_target_that_has_changed(verify):
    """A patch is refused if the target has changed the tensor; with `verify`, also where the source has not."""
    source = [np.zeros(100), np.zeros(100)]
    pair = Pair(source, [one.copy() for one in source])
    pair.target[1][7] = 5
    source[0][3] = 1
    if verify:
        with pytest.raises(Unpatched, match="'1'"):
            pair.send(verify=True)
        return
    pair.send()
    source[1][3] = 1
    with pytest.raises(Unpatched, match="it has changed '1' since the last version"):
        pair.send()


def test_a_target_with_another_dtype():
    """One that loses nothing of what travels is patched; for one that does, the reason says what to do."""
    source = [np.linspace(0, 1, 100, dtype="float32")]
    wide, narrow = (Pair(source, [source[0].astype(dtype)]) for dtype in ("float64", "float16"))
    source[0][7] = 3
    wide.send()
    assert np.array_equal(wide.target[0], source[0])
    with pytest.raises(Unpatched, match="or keeps less of it as float16 than travels as float32: then give the link"):
        narrow.send()


def test_reasons_for_whole_tensors():
    """Tensors travel as a whole if the plan, the version or the kind of memory is another one, or nothing is kept."""
    pair = Pair([np.zeros(3)], [np.zeros(3)])
    same, other = pair.sent, {**pair.sent, "dtypes": ["float32"]}
    assert not pair.base.explain_whole({**same, "id": 2}, 0, False)
    for orders, since, in_blocks in ((other, 0, False), (same, 1, False), (same, 0, True), (same, -1, False)):
        assert "keeps no copy" in pair.base.explain_whole(orders, since, in_blocks)
    assert pair.base.follow(pair.read(), 1, None, False) == ("", [])
    assert "keeps no copy" in pair.base.explain_whole(same, 0, False)


@pytest.mark.parametrize("name", ["numpy", "xxhash"])
def test_a_python_that_lacks_a_package(name, monkeypatch):
    """A source without it sends whole tensors, and a target without it asks for them."""
    pair = Pair([np.zeros(3)], [np.zeros(3)])
    pair.tensors[0][1] = 1
    here = importlib.util.find_spec
    monkeypatch.setattr(delta.importlib.util, "find_spec", lambda one: None if one == name else here(one))
    assert pair.base.explain_whole(pair.sent, 0, False) == f"its Python has no {name}"
    (channel,) = pair.base.stage(pair.read(), 1, False)
    with pytest.raises(Unpatched, match=f"its Python has no {name}"):
        fetch_patches(Context(pair.tools, pair.orders, pair.target, {}), channel, pair.ordered, 0.0)
    assert pair.base.follow(pair.read(), 2, (1, False, False), False) == (f"its Python has no {name}", [])
    assert pair.base.epoch == -1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "complex128"])
def test_torch(dtype):
    """Torch tensors of any dtype and stride are patched, bit for bit."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    make = [torch.rand(shape).to(getattr(torch, dtype)) for shape in ((40, 30), (20, 10), ())]
    # The first one is strided in the source, the second one in the target.
    source = [make[0].t(), *make[1:]]
    target = [make[0].t().contiguous().clone(), make[1].t().contiguous().clone().t(), make[2].clone()]
    pair = Pair(source, target, "torch")
    make[0].view(torch.uint8)[::7, 5:9] = 17
    make[1].view(torch.uint8)[::7, 5:9] = 17
    make[2].fill_(3)
    pair.send()
    source[0].copy_(torch.rand(30, 40))
    pair.send()
    for value, other in zip(source, target, strict=True):
        assert torch.equal(value.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
