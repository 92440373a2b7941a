# SPDX-License-Identifier: Apache-2.0
"""Pickling of arrays and lists: out of band, without copies. For tensors see test_torch.py, for Ray tests/ray."""

import pickle

import numpy as np
import pytest

from fairlead_batching import BatchedDataDict, Order, SlicedDataDict


def test_out_of_band():
    """Contiguous memory is not copied, other memory is copied once, and the pickle itself is small."""
    big = np.arange(100_000.0).reshape(2, -1)
    batch = BatchedDataDict(row=big, column=np.asfortranarray(big), strided=big[:, ::2], empty=np.zeros((2, 0)))
    buffers = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1500
    memory = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    assert [part.size for part in memory] == [800_000, 800_000, 400_000, 0]
    assert np.shares_memory(memory[0], big)
    received = pickle.loads(data, buffers=buffers)
    assert np.shares_memory(received["row"], big)
    for key in batch:
        assert np.array_equal(received[key], batch[key])


def test_a_shard_carries_its_own_samples_only():
    """The pickle of a shard does not contain the memory of other shards."""
    shards = BatchedDataDict(x=np.zeros((8, 1000))).shard_by_batch_size(4)
    assert len(pickle.dumps(shards[2])) < 2 * 8000 + 1500


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol(protocol):
    """Pickling restores values, class, plan and additional attributes."""
    args = {
        "max_tokens_per_microbatch": 4,
        "sequence_length_round": 1,
        "input_key": "x",
        "input_lengths_key": "n",
    }
    batch = BatchedDataDict[dict](x=np.ones((2, 2)), n=[1, 2], when=[{"day": (1, [2])}, None])
    batch.note = "kept"
    (shard,), order = batch.shard_by_batch_size(1, dynamic_batching_args=args)
    received, again, kept = pickle.loads(pickle.dumps((shard, order, batch), protocol))
    assert type(received) is SlicedDataDict
    assert received["when"] == [{"day": (1, [2])}, None]
    assert received.micro_batch_indices == shard.micro_batch_indices
    assert received.micro_batch_lengths == shard.micro_batch_lengths
    assert type(again) is Order
    assert again == order
    assert kept.note == "kept"


def test_shared_objects_stay_shared():
    """Shared objects and objects that contain themselves are restored as such."""
    log = ["hello"]
    log.append(log)
    received = pickle.loads(pickle.dumps(BatchedDataDict(a=[log, log], b=[[log], 1])))
    assert received["a"][0] is received["a"][1] is received["b"][0][0]
    assert received["a"][0][1] is received["a"][0]
