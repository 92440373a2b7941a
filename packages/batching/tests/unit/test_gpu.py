# SPDX-License-Identifier: Apache-2.0
"""Leaves on a GPU: every operation leaves them there, with the values that it has on a CPU. Skipped without a GPU."""

import pickle
import warnings

import numpy as np
import pytest

from fairlead_batching import BatchedDataDict, RaggedLeaf

from .test_torch import KEYS, TENSORS, same

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

GPU = "cuda"


def to_gpu(tensor):
    """Return the same tensor on the GPU, with the same strides where torch keeps them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.detach().to(GPU)


def check(expected, found):
    """Check that a result is on the GPU and has the values of a CPU."""
    assert found.device.type == GPU
    assert same(expected.detach(), found.detach().cpu().resolve_conj().resolve_neg())


@pytest.mark.parametrize("key", TENSORS)
def test_samples_of_every_kind(key):
    """Gathering, joining, padding, slicing and sharding work for every dtype and stride."""
    on_cpu, on_gpu = BatchedDataDict(x=TENSORS[key]), BatchedDataDict(x=to_gpu(TENSORS[key]))
    for operation in (
        lambda batch: batch.select_indices([2, 0, 2])["x"],
        lambda batch: batch.pad_to_multiple(3)["x"],
        lambda batch: batch.pad_to_multiple(3).drop_padding()["x"],
        lambda batch: batch.slice(1, 3)["x"],
        lambda batch: batch.repeat_interleave(2)["x"],
        lambda batch: BatchedDataDict.from_batches([batch, batch])["x"],
        lambda batch: list(batch.make_microbatch_iterator(2))[1]["x"],
        lambda batch: batch.shard_by_batch_size(2)[1]["x"],
    ):
        check(operation(on_cpu), operation(on_gpu))
    assert same(on_cpu["x"].detach(), on_gpu.to_device("cpu")["x"].resolve_conj().resolve_neg())
    assert on_cpu.to_device(GPU)["x"].device.type == GPU


def test_joining_of_unequal_lengths():
    """Shorter tensors are padded on the GPU."""
    leaves = [torch.ones(shape, dtype=torch.bfloat16, device=GPU) for shape in ((1, 3, 2), (2, 1, 2))]
    joined = BatchedDataDict.from_batches([{"x": leaf} for leaf in leaves], {"x": -5})["x"]
    assert joined.device.type == GPU
    assert joined[:, :, 0].tolist() == [[1, 1, 1], [1, -5, -5], [1, -5, -5]]


PLANS = {
    "dynamic": {"dynamic_batching_args": {"max_tokens_per_microbatch": 10, "sequence_length_round": 2, **KEYS}},
    "packed": {
        "sequence_packing_args": {
            "max_tokens_per_microbatch": 10,
            "algorithm": "balanced",
            "sequence_length_pad_multiple": 2,
            **KEYS,
        }
    },
    "even": {},
}


@pytest.mark.parametrize("planned", PLANS)
def test_shards_and_order(make_batch, planned):
    """Shards, microbatches and the restored order are those of arrays, and stay on the GPU."""
    arrays = make_batch([2, 8, 4, 6, 1, 7, 3, 5])
    on_gpu = {
        key: torch.from_numpy(leaf).to(GPU) if isinstance(leaf, np.ndarray) else leaf for key, leaf in arrays.items()
    }
    tensors = BatchedDataDict(on_gpu)
    (expected, order), (found, same_order) = (
        batch.shard_by_batch_size(2, **PLANS[planned]) if PLANS[planned] else (batch.shard_by_batch_size(2), None)
        for batch in (arrays, tensors)
    )
    assert order == same_order
    results = []
    for one, other in zip(expected, found, strict=True):
        if planned == "dynamic":
            parts = [batch.make_microbatch_iterator_with_dynamic_shapes() for batch in (one, other)]
        elif planned == "packed":
            parts = [batch.make_microbatch_iterator_for_packable_sequences() for batch in (one, other)]
        else:
            parts = [batch.make_microbatch_iterator(2) for batch in (one, other)]
        for cpu, gpu in zip(*parts, strict=True):
            assert gpu["tokens"].device.type == GPU
            assert gpu["tokens"].cpu().numpy().tolist() == cpu["tokens"].tolist()
            assert gpu["length"].tolist() == cpu["length"].tolist()
        results.append({"tokens": other["tokens"], "length": other["length"]})
    if order is not None:
        restored = order.restore(results)
        assert restored["tokens"].device.type == GPU
        assert restored["length"].tolist() == arrays["length"].tolist()


def test_packed_row(make_batch):
    """A row end to end is made and taken apart on the GPU."""
    arrays = make_batch([2, 8, 4, 6])
    tensors = BatchedDataDict(
        {key: torch.from_numpy(leaf).to(GPU) for key, leaf in arrays.items() if isinstance(leaf, np.ndarray)}
    )
    shards, _ = tensors.shard_by_batch_size(2, **PLANS["packed"])
    for shard in shards:
        for part in shard.make_microbatch_iterator_for_packable_sequences():
            row = part.to_packed()
            assert row["tokens"].device.type == GPU
            assert row.cu_seqlens.device.type == GPU
            assert row.cu_seqlens.dtype == torch.int32
            back = row.unpack({"tokens": row["tokens"]})["tokens"]
            assert back.device.type == GPU
            for sample, length in enumerate(part["length"].tolist()):
                assert same(part["tokens"][sample, :length].cpu(), back[sample, :length].cpu())


def test_ragged_rows():
    """Rows of different lengths move to the GPU and back."""
    leaf = RaggedLeaf([torch.arange(size) for size in (3, 1, 2)])
    moved = BatchedDataDict(x=leaf).to_device(GPU)
    chosen = moved.select_indices([2, 0])["x"]
    assert [row.device.type for row in chosen] == [GPU, GPU]
    assert [row.tolist() for row in chosen] == [[0, 1], [0, 1, 2]]
    assert [row.tolist() for row in moved.to_device("cpu")["x"]] == [[0, 1, 2], [0], [0, 1]]


def test_pickling_is_refused():
    """A tensor on the GPU is refused with a remedy when it is pickled."""
    batch = BatchedDataDict(logits=torch.zeros(1, device=GPU))
    with pytest.raises(ValueError, match=r"Leaf 'logits' .* cuda:0.*to_device\('cpu'\)"):
        pickle.dumps(batch)


def test_gathered_by_nccl(tmp_path):
    """`all_gather` sends tensors of every dtype by NCCL."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        leaves = {key: to_gpu(tensor) for key, tensor in TENSORS.items()}
        gathered = BatchedDataDict({**leaves, "prompt": list("abcd")}).all_gather()
        for key, leaf in leaves.items():
            check(leaf.cpu(), gathered[key])
        assert gathered["prompt"] == list("abcd")
    finally:
        torch.distributed.destroy_process_group()
