# SPDX-License-Identifier: Apache-2.0
"""The order in which samples were sent out, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._batch import BatchedDataDict


class Order(list[int]):
    """The permutation that `BatchedDataDict.shard_by_batch_size` applied.

    Position i of the shards laid end to end holds the caller's sample ``order[i]``. It is a plain list of ints, so
    ``BatchedDataDict.from_batches(results).reorder_data(order)`` restores the caller's order, as does `restore`.
    """

    def restore(
        self, results: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, Any] | None = None
    ) -> BatchedDataDict[Any]:
        """The shards' results as one batch in the caller's order.

        Args:
            results: one batch per shard, in the order of the shards; their keys may be others than those sent out.
            pad_value_dict: as in `BatchedDataDict.from_batches`.

        Raises:
            ValueError: the results do not have one sample for each that was sent out.

        >>> Order([2, 0, 1]).restore([{"loss": [0.3, 0.1]}, {"loss": [0.2]}])["loss"]
        [0.1, 0.2, 0.3]
        """
        from ._batch import BatchedDataDict

        batch: BatchedDataDict[Any] = BatchedDataDict.from_batches(results, pad_value_dict)
        if batch.size != len(self):
            sizes = [BatchedDataDict(result).size for result in results]
            raise ValueError(f"{len(self)} samples were sent out, {batch.size} came back: {sizes} by shard.")
        return batch.reorder_data(self)
