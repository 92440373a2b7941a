# SPDX-License-Identifier: Apache-2.0
"""torch tensors as leaves. Skipped if torch is not installed."""

import copy
import datetime
import pickle
import warnings

import numpy as np
import pytest

from fairlead_batching import BatchedDataDict, RaggedLeaf

torch = pytest.importorskip("torch", reason="needs torch")

BASE = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "float32": BASE,
    "transposed": BASE.t().contiguous().t(),
    "strided": BASE[:, ::2],
    "expanded": torch.arange(4.0)[:, None].expand(4, 3),
    "part": torch.arange(100).reshape(10, 10)[3:7, 2:5],
    "channels_last": torch.arange(96.0).reshape(4, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "conjugate": torch.complex(BASE, BASE + 1).conj(),
    "negative": torch._neg_view(BASE),
    "requires_grad": BASE.clone().requires_grad_(),
    "computed": BASE.clone().requires_grad_() * 2,
    "parameter": torch.nn.Parameter(BASE),
    "zero_width": torch.zeros(4, 0),
    "bool": BASE > 3,
    "bfloat16": BASE.bfloat16(),
    "strided_bfloat16": BASE.bfloat16()[:, ::2],
    "float16": BASE.half(),
    "float8": BASE.to(torch.float8_e4m3fn),
    "uint16": BASE.to(torch.uint16),
    "int64": BASE.long(),
    "large": torch.arange(400_000).reshape(4, -1),
}
OTHERS = {
    "zero_dims": torch.tensor(2.5),
    "zero_dims_bfloat16": torch.tensor(2.5).bfloat16(),
    "zero_rows": torch.zeros(0, 3),
    "sparse": torch.eye(3).to_sparse(),
}
KEYS = {"input_key": "tokens", "input_lengths_key": "length"}


def same(one, other):
    """Return whether two tensors are equal in bits, dtype, class and shape."""
    if one.layout != torch.strided:
        return same(one.to_dense(), other.to_dense())
    one = one.detach().resolve_conj().resolve_neg()
    if one.dtype != other.dtype or one.shape != other.shape or type(other) is not torch.Tensor:
        return False
    return one.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("key", [*TENSORS, *OTHERS])
def test_pickled_by_value(key, view, protocol):
    """Every kind of CPU tensor keeps its values, dtype and shape; gradients are not transferred."""
    batch = BatchedDataDict({key: {**TENSORS, **OTHERS}[key]})
    if view:
        batch._read_only()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = pickle.loads(pickle.dumps(batch, protocol))
    assert same(batch[key], received[key])
    assert not received[key].requires_grad


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
            "is a nested tensor: pad it",
        ),
        (torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.strided), "is a nested tensor: pad"),
        (torch.zeros(2, dtype=torch.complex32), "is a tensor of complex32: convert it to complex64"),
    ],
    ids=["jagged", "strided", "complex32"],
)
def test_other_tensors_are_refused(leaf, message):
    """Nested tensors and those of complex32 are refused by the key of the leaf, with a remedy."""
    batch = BatchedDataDict(x=leaf)
    for use in (lambda: batch.size, lambda: batch.slice(0, 1), lambda: pickle.dumps(batch)):
        with pytest.raises(TypeError, match=f"Leaf 'x' {message}"):
            use()


@pytest.mark.parametrize("view", [False, True])
def test_out_of_band(view):
    """Dense memory is sent without a copy, and read as a copy, or without one if nobody writes."""
    buffers = []
    batch = BatchedDataDict({key: TENSORS[key] for key in ("float32", "transposed", "bfloat16", "large")})
    if view:
        batch._read_only()
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1500
    for tensor, buffer in zip(batch.values(), buffers, strict=True):
        assert np.frombuffer(buffer.raw(), np.uint8).ctypes.data == tensor.data_ptr()
    # Bytes are read-only, as Ray's store is.
    sent = [bytes(buffer.raw()) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = pickle.loads(data, buffers=sent)
    for key, buffer in zip(batch, sent, strict=True):
        assert (received[key].data_ptr() == np.frombuffer(buffer, np.uint8).ctypes.data) is view
        assert same(batch[key], received[key])
    if not view:
        received["float32"] += 1
        assert same(batch["float32"], pickle.loads(data, buffers=sent)["float32"])


@pytest.mark.parametrize("view", [False, True])
def test_ragged_rows_are_views(view):
    """The promise of _read_only() holds for ragged rows too: without it, a reader gets a copy."""
    rows = RaggedLeaf([torch.full((length, 64), 1.0) for length in (3, 1, 2)])
    batch = BatchedDataDict(rows=rows, same=rows, part=rows.take(np.array([2, 2, 2])))
    buffers = []
    data = pickle.dumps(batch._read_only() if view else batch, protocol=5, buffer_callback=buffers.append)
    sent = [bytes(buffer.raw()) for buffer in buffers]
    received = pickle.loads(data, buffers=sent)
    assert received.data == batch.data
    assert received["rows"] is received["same"]
    addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in sent]
    for key in ("rows", "part"):
        assert (received[key].buffer.data_ptr() in addresses) is view
    assert received["part"].buffer.shape == (2 * 64,), "only its own rows were sent"


def test_views_keep_the_memory_alive():
    """The memory under a reader's tensors lives as long as they do."""
    buffers = []
    data = pickle.dumps(BatchedDataDict(x=BASE)._read_only(), protocol=5, buffer_callback=buffers.append)
    sent = [np.frombuffer(bytes(buffer.raw()), np.uint8) for buffer in buffers]
    received = pickle.loads(data, buffers=sent)["x"]
    del sent, buffers
    filler = [bytes(96) for _ in range(1000)]
    assert same(BASE, received)
    assert len(filler) == 1000


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("key", [key for key in TENSORS if key != "zero_width"])
def test_memory_is_aligned(key, view):
    """A reader's tensor is aligned and has the right values for any alignment of the buffers."""
    batch = BatchedDataDict({key: TENSORS[key]})
    if view:
        batch._read_only()
    buffers = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    for offset in (0, 8, 1):
        memory = np.zeros(buffers[0].raw().nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 32 + offset
        placed = memory[start : start + buffers[0].raw().nbytes]
        placed[:] = np.frombuffer(buffers[0].raw(), np.uint8)
        placed.flags.writeable = False
        received = pickle.loads(data, buffers=[placed])[key]
        assert received.data_ptr() % 16 == 0
        assert (received.data_ptr() == placed.ctypes.data) is (view and offset == 0)
        assert same(batch[key], received)


def test_read_only_is_not_inherited():
    """The promise of _read_only() applies neither to parts of the batch nor to a batch that a reader sends on."""
    batch = BatchedDataDict(x=BASE)._read_only()
    reader = pickle.loads(pickle.dumps(batch))
    for sent in (batch.slice(0, 4), reader, batch.to_device("cpu")):
        buffers = []
        data = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
        received = pickle.loads(data, buffers=buffers)
        assert received["x"].data_ptr() != sent["x"].data_ptr()


def test_tensors_in_lists_are_refused():
    """A list that holds a tensor at any depth is refused by name when it is pickled, and can be used until then."""
    log = [{"ids": BASE, "both": (BASE, 1)}, None]
    log.append(log)
    batch = BatchedDataDict(log=log)
    assert batch.slice(0, 1)["log"][0]["ids"] is BASE
    with pytest.raises(TypeError, match=r"Leaf 'log' is a dict or holds one with a tensor in it, .* a RaggedLeaf of"):
        pickle.dumps(batch)
    with pytest.raises(TypeError, match="Leaf 'pairs' is a tuple or holds one with a tensor in it"):
        pickle.dumps(BatchedDataDict(pairs=[(1, BASE)]))


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: RaggedLeaf([tensor])])
def test_other_devices_are_refused(wrap):
    """A tensor on another device is refused with a remedy when it is pickled, but can be copied."""
    device = "cuda" if torch.cuda.is_available() else "meta"
    batch = BatchedDataDict(logits=wrap(torch.zeros(1, device=device)))
    with pytest.raises(ValueError, match=rf"Leaf 'logits' is or holds a tensor on {device}.*to_device\('cpu'\)"):
        pickle.dumps(batch)
    copy.deepcopy(batch)


def test_torch_is_missing_at_the_reader(run_python, tmp_path):
    """A reader without torch gets an error that names it."""
    (tmp_path / "batch").write_bytes(pickle.dumps(BatchedDataDict(x=BASE)))
    script = """
        import pickle
        try:
            pickle.load(open("batch", "rb"))
        except ImportError as error:
            print(error.name, error)
    """
    assert "torch torch tensors need torch, which cannot be imported here" in run_python(script, block=["torch"])


@pytest.mark.parametrize("key", TENSORS)
def test_samples_of_every_kind(key):
    """Gathering, joining, padding and slicing work for every dtype and stride, and keep both dtype and values."""
    tensor = TENSORS[key]
    batch = BatchedDataDict(x=tensor)
    rows = [tensor[number] for number in (2, 0, 2)]
    chosen = batch.select_indices([2, 0, 2])["x"]
    assert chosen.dtype == tensor.dtype
    assert all(same(row, chosen[number].detach().resolve_conj().resolve_neg()) for number, row in enumerate(rows))
    assert batch.pad_to_multiple(3)["x"].shape == (6, *tensor.shape[1:])
    assert BatchedDataDict.from_batches([batch, batch])["x"].shape[0] == 8
    assert [part["x"].shape[0] for part in batch.make_microbatch_iterator(2)] == [2, 2]


def test_joining():
    """Shorter tensors are padded on the right of dim 1."""
    leaves = [torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 3, 2), (2, 1, 2))]
    joined = BatchedDataDict.from_batches([{"x": leaf} for leaf in leaves], {"x": -5})["x"]
    assert joined.dtype == torch.bfloat16
    assert joined[:, :, 0].tolist() == [[1, 1, 1], [1, -5, -5], [1, -5, -5]]
    with pytest.raises(TypeError, match=r"several kinds .*\['numpy', 'torch'\]"):
        BatchedDataDict.from_batches([{"x": torch.ones(1)}, {"x": np.ones(1)}])


def test_gradients_flow_through_shards():
    """In one process a shard's samples still belong to the autograd graph."""
    tokens = torch.ones(4, 2, requires_grad=True)
    order = BatchedDataDict(x=tokens).shard_by_batch_size(2)
    (order[1]["x"] * 3).sum().backward()
    assert tokens.grad.tolist() == [[0, 0], [0, 0], [3, 3], [3, 3]]


def test_planned_like_numpy(make_batch):
    """Tensors, arrays and lists of lengths give the same shards."""
    arrays = make_batch([2, 8, 4, 6, 1, 7, 3, 5])
    tensors = BatchedDataDict(
        {**arrays, "tokens": torch.tensor(arrays["tokens"]), "length": torch.tensor(arrays["length"])}
    )
    args = {"max_tokens_per_microbatch": 10, **KEYS}
    for planned in (
        {"dynamic_batching_args": {**args, "sequence_length_round": 2}},
        {"sequence_packing_args": {**args, "algorithm": "balanced", "sequence_length_pad_multiple": 2}},
    ):
        (expected, order), (found, same_order) = (
            batch.shard_by_batch_size(2, **planned) for batch in (arrays, tensors)
        )
        assert order == same_order
        for one, other in zip(expected, found, strict=True):
            assert one.micro_batch_indices == other.micro_batch_indices
            assert one["tokens"].tolist() == other["tokens"].tolist()
        assert order.restore(found)["tokens"].equal(tensors["tokens"])


def test_indices_are_tensors():
    """Indices and permutations may be tensors."""
    batch = BatchedDataDict(x=BASE)
    order = torch.tensor([2, 0, 3, 1])
    assert batch.select_indices(order).reorder_data(order)["x"].equal(BASE)


def test_indices_are_reversed_views():
    """Indices may be a view with negative strides, such as those of a descending sort."""
    descending = np.arange(4)[::-1]
    assert BatchedDataDict(x=BASE).select_indices(descending)["x"].equal(BASE.flip(0))


def test_padding_mask():
    """The mask is a tensor if a leaf is one."""
    padded = BatchedDataDict(x=[1, 2, 3], y=torch.ones(3)).pad_to_multiple(2)
    assert padded["sample_mask"].equal(torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert padded.drop_padding()["y"].equal(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_mask_of_any_dtype(dtype):
    """A mask may have any dtype, including those that numpy lacks."""
    batch = BatchedDataDict(x=[1, 2, 3], mask=torch.tensor([[1, 0], [0, 0], [0, 1]]).to(dtype))
    assert batch.drop_padding(mask_key="mask")["x"] == [1, 3]
    assert batch.slice(0, 0).drop_padding(mask_key="mask")["x"] == []


def test_lengths_of_a_dtype_that_numpy_lacks():
    """Lengths are whole numbers; others are refused with their dtype."""
    batch = BatchedDataDict(x=BASE, length=torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="'length' must be whole numbers, found bfloat16"):
        batch.shard_by_batch_size(
            2,
            dynamic_batching_args={
                "max_tokens_per_microbatch": 12,
                "sequence_length_round": 1,
                "input_key": "x",
                "input_lengths_key": "length",
            },
        )


def test_pad_values_out_of_range():
    """A tensor of integers is not padded with a value that its dtype would change."""
    batches = [{"x": torch.ones((1, width), dtype=torch.uint8)} for width in (2, 1)]
    for value in (-1, 0.5, 300, float("nan")):
        with pytest.raises(ValueError, match=r"Leaf 'x' cannot be padded with .*: its dtype is torch.uint8"):
            BatchedDataDict.from_batches(batches, {"x": value})
    assert BatchedDataDict.from_batches(batches, {"x": 255})["x"].tolist() == [[1, 1], [1, 255]]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float8_e4m3fn", 449),
        ("float8_e4m3fn", float("inf")),
        ("float8_e8m0fnu", 0),
        ("float16", 1e6),
        ("bfloat16", torch.finfo(torch.float32).min),
        ("float32", 1e300),
        ("float32", None),
        ("float32", 1j),
        ("complex64", 1e300j),
        ("int64", None),
        ("int64", 2**63),
        ("bool", 2),
    ],
)
def test_pad_values_beyond_the_dtype(dtype, value):
    """A value out of range is refused with the leaf's name and never changed silently."""
    batches = [{"x": torch.ones(1, width).to(getattr(torch, dtype))} for width in (2, 1)]
    with pytest.raises(ValueError, match=rf"Leaf 'x' cannot be padded with .*: its dtype is torch.{dtype}"):
        BatchedDataDict.from_batches(batches, {"x": value})


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float8_e4m3fn", 448),
        ("float8_e5m2", float("-inf")),
        ("float16", float("nan")),
        ("complex64", 1j),
        ("int64", 2**63 - 1),
        ("bool", True),
    ],
)
def test_pad_values_that_tensors_hold(dtype, value):
    """A value within range is kept, including the limits and infinity."""
    batches = [{"x": torch.ones(1, width).to(getattr(torch, dtype))} for width in (2, 1)]
    padded = BatchedDataDict.from_batches(batches, {"x": value})["x"]
    assert same(padded[1, 1:], torch.tensor([value]).to(getattr(torch, dtype)))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_dtypes_do_not_mix(dtype, width):
    """Tensors of two dtypes are refused by name, with and without padding."""
    with pytest.raises(ValueError, match=r"'x' cannot be joined: found dtypes \['torch.int64', '.*one dtype first"):
        BatchedDataDict.from_batches([{"x": torch.tensor([[1]])}, {"x": torch.ones((1, width)).to(dtype)}])


def test_devices():
    """to() moves tensors in place, to_device() to a new batch."""
    batch = BatchedDataDict(x=BASE, y=np.ones(4))
    moved = batch.to_device("meta")
    assert (moved["x"].device.type, batch["x"].device.type) == ("meta", "cpu")
    assert batch.to("meta") is batch
    assert batch["x"].device.type == "meta"
    assert isinstance(batch["y"], np.ndarray)


class FailsAtTheReader:
    """An object that fails to unpickle on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def __setstate__(self, state):
        if torch.distributed.get_rank() == state["rank"]:
            raise OSError("only one rank fails")


def gather(rank, path):
    # Shorter than the test's own limit, so that a rank that waits for a failed one ends.
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    batch = BatchedDataDict(
        ids=torch.full((rank + 1, rank + 2), rank, dtype=torch.bfloat16),
        flag=torch.tensor([True] * (rank + 1)),
        array=np.full(rank + 1, rank),
        name=[f"rank {rank}"] * (rank + 1),
        column=torch.full((rank + 1, 8), rank + 0.5)[:, 0],
        conjugate=torch.full((rank + 1,), 1 + 2j).conj(),
        negative=torch._neg_view(torch.ones(rank + 1)),
    )
    everything = batch.all_gather()
    assert everything["ids"].dtype == torch.bfloat16
    assert everything["ids"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert everything["flag"].tolist() == [True] * 3
    assert everything["column"].tolist() == [0.5, 1.5, 1.5]
    assert everything["array"].tolist() == [0, 1, 1]
    assert everything["name"] == ["rank 0", "rank 1", "rank 1"]
    assert everything["conjugate"].tolist() == [1 - 2j] * 3
    assert everything["negative"].tolist() == [-1.0] * 3
    padded = batch.pad_to_multiple(3).all_gather()
    assert padded.size == 6
    assert padded.drop_padding()["name"] == everything["name"]
    assert everything.padding is None
    one_sided = batch.pad_to_multiple(1 + rank * 2)
    one_sided.padding = one_sided.padding if rank else None
    assert one_sided.all_gather().padding.tolist() == [False, False, False, True]
    with pytest.raises(ValueError, match=r"Ranks have different keys: \[\['r0'\], \['r1'\]\]"):
        BatchedDataDict({f"r{rank}": [1]}).all_gather(torch.distributed.group.WORLD)
    with pytest.raises(ValueError, match=r"Ranks have different leaves 'x': .*\(1, 1\)"):
        BatchedDataDict(x=torch.ones((1,) * (rank + 1))).all_gather()
    assert BatchedDataDict(x=torch.ones(rank, 3), y=["a"] * rank).all_gather()["x"].tolist() == [[1, 1, 1]]
    one_sided = {
        r"rank 1 \(\w+Error: .*<lambda>": lambda: [lambda: None] if rank else ["a"],
        r"rank 1 \(ValueError: .*no dims": lambda: torch.tensor(1.0) if rank else torch.ones(1),
        r"rank 0 \(TypeError: Leaf 'x' must be a list": lambda: torch.ones(1) if rank else "abc",
        r"on rank 1 \(RuntimeError: ": lambda: torch.eye(2).to_sparse() if rank else torch.eye(2),
        r"rank 1 \(OSError: only one rank fails": lambda: [FailsAtTheReader(1)],
        r"different leaves 'x': .*'cpu'.*'meta'": lambda: torch.ones(2, device="meta" if rank else "cpu"),
    }
    for message, leaf in one_sided.items():
        with pytest.raises(ValueError, match=message):
            BatchedDataDict(x=leaf()).all_gather()
    assert BatchedDataDict(x=torch.full((1,), rank)).all_gather()["x"].tolist() == [0, 1]
    torch.distributed.destroy_process_group()
    (path / f"done {rank}").touch()


def test_all_gather(tmp_path):
    """Two processes gather different samples, widths and dtypes in the order of ranks; a failure raises on both."""
    torch.multiprocessing.start_processes(gather, args=(tmp_path,), nprocs=2, start_method="fork")
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done 0", "done 1"]
