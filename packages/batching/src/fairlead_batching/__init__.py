# SPDX-License-Identifier: Apache-2.0
"""Batches of tensors: shard, pad, pack, microbatch, restore - with the same number of microbatches on every rank.

>>> import numpy as np
>>> batch = BatchedDataDict(tokens=np.arange(24).reshape(4, 6), length=np.array([6, 2, 3, 5]))
>>> shards, order = batch.shard_by_batch_size(
...     shards=2,
...     dynamic_batching_args=DynamicBatchingArgs(
...         max_tokens_per_microbatch=8, sequence_length_round=2, input_key="tokens", input_lengths_key="length"
...     ),
... )
>>> [[tuple(part["tokens"].shape) for part in shard.make_microbatch_iterator_with_dynamic_shapes()] for shard in shards]
[[(1, 4), (1, 6)], [(1, 4), (1, 6)]]

Both ranks run two microbatches of the same shapes. Their results are restored to the order of the batch:

>>> results = [{"double": 2 * shard["length"]} for shard in shards]
>>> order.restore(results)["double"].tolist()
[12, 4, 6, 10]
"""

from ._args import DynamicBatchingArgs, SequencePackingArgs
from ._batch import BatchedDataDict, Order, SlicedDataDict
from ._leaves.ragged import RaggedLeaf
from ._packed import PackedBatch
from ._packing.packer import Packer, get_packer
from ._plan import ShardPlan
from ._planner import plan_shards
from ._remote import BatchLostError, RemoteBatch

__version__ = "0.1.0"

__all__ = [
    "BatchLostError",
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "Order",
    "PackedBatch",
    "Packer",
    "RaggedLeaf",
    "RemoteBatch",
    "SequencePackingArgs",
    "ShardPlan",
    "SlicedDataDict",
    "__version__",
    "get_packer",
    "plan_shards",
]
