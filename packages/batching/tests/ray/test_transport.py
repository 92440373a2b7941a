# SPDX-License-Identifier: Apache-2.0
"""Transport through Ray: one copy in, safe reads, views if promised. Skipped if Ray or torch is not installed."""

import numpy as np
import pytest

from fairlead_batching import BatchedDataDict

ray = pytest.importorskip("ray", reason="needs ray")
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("fairlead_placement", reason="the fixtures for Ray need fairlead-placement")

pytestmark = pytest.mark.usefixtures("local_ray")

BASE = torch.arange(240_000.0).reshape(400, 600)
LEAVES = {
    "float32": BASE,
    "transposed": BASE.t().contiguous().t(),
    "strided": BASE[:, ::2],
    "expanded": torch.arange(400.0)[:, None].expand(400, 500),
    "zero_width": torch.zeros(400, 0),
    "bool": BASE > 3,
    "bfloat16": BASE.bfloat16(),
    "small": torch.arange(400),
    "large": torch.arange(8_000_000).reshape(400, -1),
    "numpy": BASE.numpy(),
    "strided_numpy": BASE.numpy()[:, ::3],
    "names": [f"sample {number}" for number in range(400)],
    "log": [[{"ids": np.arange(number)}] for number in range(400)],
}


def check(received, sent):
    for key in ("numpy", "strided_numpy"):
        assert np.array_equal(received[key], sent[key])
    assert received["names"] == sent["names"]
    assert all(
        np.array_equal(one[0]["ids"], other[0]["ids"]) for one, other in zip(received["log"], sent["log"], strict=True)
    )
    for key, leaf in sent.items():
        if isinstance(leaf, torch.Tensor):
            assert received[key].dtype == leaf.dtype, key
            assert received[key].equal(leaf), key


@ray.remote(num_cpus=0)
def echo(batch):
    """Write to the batch that was received, and return its previous contents."""
    answer = BatchedDataDict({key: leaf.clone() if hasattr(leaf, "clone") else leaf for key, leaf in batch.items()})
    batch["float32"] += 1
    return answer


@pytest.mark.parametrize("view", [False, True])
def test_put_and_get(view):
    """Every kind of leaf arrives unchanged; tensors are views of the store only if nobody writes."""
    batch = BatchedDataDict(LEAVES)
    if view:
        batch._read_only()
    ref = ray.put(batch)
    one, other = ray.get(ref), ray.get(ref)
    check(one, batch)
    for key in ("float32", "transposed", "bfloat16", "large"):
        assert (one[key].data_ptr() == other[key].data_ptr()) is view, key
    for key in ("numpy", "strided_numpy"):
        assert not one[key].flags.writeable
        assert np.shares_memory(one[key], other[key])


@pytest.mark.parametrize("view", [False, True])
def test_zero_dims(view):
    """Leaves without dims arrive, although they have no samples; so do leaves too small for Ray's store."""
    batch = BatchedDataDict(x=torch.tensor(2.5).bfloat16(), y=np.array(3), z=torch.zeros(0))
    if view:
        batch._read_only()
    received = ray.get(ray.put(batch))
    assert (received["x"].item(), received["x"].dtype, received["y"].item()) == (2.5, torch.bfloat16, 3)
    assert received["z"].shape == (0,)


@pytest.mark.parametrize("view", [False, True])
def test_memory_is_aligned(view):
    """A tensor is aligned at any position in Ray's store; torch requires it for complex128."""
    for before in (1, 9, 17, 2048):
        leaves = {
            "before": torch.zeros(before, dtype=torch.uint8),
            **{str(size): torch.full((size,), 2 + 1j, dtype=torch.complex128) for size in (1, 127, 128, 129, 9000)},
        }
        batch = BatchedDataDict(leaves)
        received = ray.get(ray.put(batch._read_only() if view else batch))
        assert [received[key].data_ptr() % 16 for key in leaves] == [0] * len(leaves)
        assert all(received[key].equal(leaf) for key, leaf in leaves.items())


def test_arguments_and_results():
    """A task may write to the tensors it is given; neither the sender nor another reader sees it."""
    batch = BatchedDataDict(LEAVES)
    ref = ray.put(batch)
    for answer in ray.get([echo.remote(ref), echo.remote(ref), echo.remote(batch)]):
        check(answer, LEAVES)
    check(ray.get(ref), LEAVES)


def test_one_copy_in():
    """Ray stores the memory of the leaves and little more; for a shard only the memory of the shard."""
    sent = BatchedDataDict(x=torch.zeros(64, 1 << 17, dtype=torch.bfloat16), y=torch.zeros(64, 1 << 16))
    size = 64 * (1 << 17) * 2 + 64 * (1 << 16) * 4
    for batch, expected in ((sent, size), *((shard, size // 4) for shard in sent.shard_by_batch_size(4))):
        buffers = []
        data = ray.cloudpickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        assert sum(buffer.raw().nbytes for buffer in buffers) == expected
        assert len(data) < 2048


def test_planned_over_tasks():
    """A batch is planned on the driver, processed by tasks, and restored to its order."""
    lengths = torch.arange(1, 33).flip(0)
    batch = BatchedDataDict(tokens=torch.ones(32, 32) * (torch.arange(32) < lengths[:, None]), length=lengths)

    @ray.remote(num_cpus=0)
    def work(shard):
        parts = list(shard.make_microbatch_iterator_with_dynamic_shapes())
        sums = torch.cat([part["tokens"].sum(1) for part in parts])
        return len(parts), BatchedDataDict(total=sums)

    shards, order = batch.pad_to_multiple(5).shard_by_batch_size(
        5,
        dynamic_batching_args={
            "max_tokens_per_microbatch": 64,
            "sequence_length_round": 8,
            "input_key": "tokens",
            "input_lengths_key": "length",
        },
    )
    counts, results = zip(*ray.get([work.remote(shard) for shard in shards]), strict=True)
    assert len(set(counts)) == 1
    assert order.restore(results)["total"][:32].equal(lengths.float())


def test_no_torch_in_a_worker_without_tensors():
    """A batch of arrays and lists is read, sharded and sent back without torch."""

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"FRESH_WORKER": "batching"}})
    def work(batch):
        import sys

        return batch.shard_by_batch_size(2)[0], "torch" in sys.modules

    answer, loaded = ray.get(work.remote(BatchedDataDict(x=np.arange(4), y=list("abcd"))))
    assert answer["y"] == ["a", "b"]
    assert not loaded
