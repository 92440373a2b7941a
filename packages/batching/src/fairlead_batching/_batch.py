# SPDX-License-Identifier: Apache-2.0
"""A dictionary of batched values: shards for all ranks at once, and their microbatches."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

from . import _leaf, _microbatches, _padding, _plan
from ._args import DynamicBatchingArgs, SequencePackingArgs, read
from ._checks import whole
from ._order import Order
from ._samples import Content, Samples


class BatchedDataDict(Samples[Content]):
    """A dictionary of *leaves*: numpy arrays, torch tensors or lists, whose first dim is the sample.

    It is an ordinary mutable dictionary; leaves are checked when they are used together. ``BatchedDataDict[T]`` says,
    to people and type checkers, what the keys are.

    >>> batch = BatchedDataDict(tokens=np.array([[1, 2, 3], [4, 0, 0]]), length=np.array([3, 1]), name=["a", "b"])
    >>> batch.size
    2
    >>> batch.slice(1, 2)
    SlicedDataDict(size=1, tokens: numpy int64[1, 3], length: numpy int64[1], name: list[1])

    What planning leaves on a shard, and None on any other batch:

    - micro_batch_indices: per group, the microbatches as ``[start, end]`` within that group's piece;
    - micro_batch_lengths: per group, the padded length of each microbatch, or the tokens of each bin;
    - elem_counts_per_gb: per group, its samples; after packing only;
    - shard_sizes: the samples of all shards, if these differ;
    - input_key: the leaf with the sequences; after dynamic batching only.

    ``data`` is the plain dictionary of the leaves. ``padding`` tells for each sample whether it is a dummy row (None:
    never padded), and follows the samples. Pickling is by protocol 5, with one copy of the memory: see `read_only`.
    Gradients do not travel.
    """

    def _repr_html_(self) -> str:
        try:
            caption = f"{type(self).__name__} of {self.size} samples"
        except (TypeError, ValueError) as error:
            caption = f"{type(self).__name__}: {error}"
        rows = [(str(key), _leaf.describe(leaf)) for key, leaf in self.data.items()]
        body = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(leaf)}</td></tr>" for key, leaf in rows)
        return f"<p>{html.escape(caption)}</p><table><tr><th>key</th><th>leaf</th></tr>{body}</table>"

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[SlicedDataDict[Content]]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any],
    ) -> tuple[list[SlicedDataDict[Content]], Order]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        sequence_packing_args: SequencePackingArgs | Mapping[str, Any],
    ) -> tuple[list[SlicedDataDict[Content]], Order]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
        sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    ) -> Any: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
        sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    ) -> list[SlicedDataDict[Content]] | tuple[list[SlicedDataDict[Content]], Order]:
        """One batch for each of ``shards`` ranks. Leaves are copied, each in one gather.

        Samples are split in groups of ``batch_size``, and each group over all shards: shard s is piece s of every
        group, one after the other. A group is what all ranks together take one optimizer step on.

        - By default each group is cut into equal pieces.
        - With ``dynamic_batching_args`` the samples of a group are sorted by length (stable) and dealt in turn, and
          microbatches are cut by tokens, alike on all shards: the longest of all shards at a position decides.
        - With ``sequence_packing_args`` the samples of a group are packed into a multiple of ``shards`` bins, which
          are dealt in turn.

        After the latter two every shard has the same number of microbatches in every group.

        Args:
            shards: how many ranks there are.
            batch_size: samples of a group; by default there is one group.
            allow_uneven_shards: lets leading shards take one sample more, if there is one group.
            dynamic_batching_args, sequence_packing_args: at most one of them; mappings with the same names will do.

        Returns:
            The shards; with dynamic batching or packing the shards and the `Order` that leads back.

        Raises:
            ValueError: an empty batch; sizes that are no multiple of each other; leaves or lengths that do not agree;
                a sequence longer than a microbatch; or too few samples for all shards to have a microbatch.

        >>> batch = BatchedDataDict(x=list("AABBCCDD"))
        >>> [shard["x"] for shard in batch.shard_by_batch_size(shards=2, batch_size=2)]
        [['A', 'B', 'C', 'D'], ['A', 'B', 'C', 'D']]
        """
        shards = whole("shards", shards, at_least=1)
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size, at_least=1)
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError("dynamic_batching_args and sequence_packing_args were both given: choose one.")
        group = _plan.group_size(self.size, shards, batch_size, allow_uneven_shards)
        if dynamic_batching_args is not None:
            dynamic = read(DynamicBatchingArgs, dynamic_batching_args)
            lengths, width = _microbatches.sequence_lengths(self, dynamic.input_key, dynamic.input_lengths_key)
            plan = _plan.dynamic(lengths, width, group, shards, dynamic)
        elif sequence_packing_args is not None:
            packing = read(SequencePackingArgs, sequence_packing_args)
            lengths, _ = _microbatches.sequence_lengths(self, packing.input_key, packing.input_lengths_key)
            plan = _plan.packed(lengths, group, shards, packing)
        else:
            return self._dealt(_plan.plain(self.size, group, shards))
        dealt = self._dealt(plan)
        if dynamic_batching_args is not None:
            for shard in dealt:
                shard.input_key = dynamic.input_key
        return dealt, Order(plan.order.tolist())

    def _dealt(self, plan: _plan.ShardPlan) -> list[SlicedDataDict[Content]]:
        gathered = self._made(lambda leaf: _leaf.take(leaf, plan.order))
        shards = []
        start = 0
        for number, size in enumerate(plan.sizes):
            shard = gathered.slice(start, start + size)
            start += size
            if plan.cuts is not None and plan.lengths is not None:
                shard.micro_batch_indices, shard.micro_batch_lengths = plan.cuts[number], plan.lengths[number]
            if plan.counts is not None:
                shard.elem_counts_per_gb = plan.counts[number]
            if len(set(plan.sizes)) > 1:
                shard.shard_sizes = list(plan.sizes)
            shards.append(shard)
        return shards

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict[Content]]:
        """Microbatches of ``microbatch_size`` samples, as views.

        Of uneven shards the last microbatch may be smaller, as long as every shard has as many microbatches.

        Raises:
            ValueError: at once, if the samples cannot be divided so, or ranks would, or after packing could, have
                different numbers of microbatches, and so wait for each other for ever.

        >>> [part["x"] for part in BatchedDataDict(x=[1, 2, 3, 4]).make_microbatch_iterator(2)]
        [[1, 2], [3, 4]]
        """
        starts = _microbatches.equal(self, microbatch_size)
        return (self.slice(start, min(start + starts.step, self.size)) for start in starts)

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1, *, sequence_keys: Iterable[str] | None = None
    ) -> Iterator[SlicedDataDict[Content]]:
        """Return the microbatches of dynamic batching, as views, with sequences truncated to the padded length.

        A shard gives those of all groups, one group after the other; a `get_batch` of it those of that group.

        Args:
            sequence_dim: the dim of the leaves that is the sequence, and is truncated.
            sequence_keys: the leaves that are truncated. By default these are the arrays and tensors whose
                ``sequence_dim`` is as wide as dim 1 of the leaf ``input_key`` of the plan. Name them if another leaf,
                such as an embedding, happens to be as wide, or if sequences have different widths.

        Raises:
            ValueError: at once, if the batch was not planned by dynamic batching, or has been changed since; a leaf in
                ``sequence_keys`` does not exist or has no such dim; or the leaf ``input_key`` is missing and
                ``sequence_keys`` is too.

        >>> batch = BatchedDataDict(tokens=np.ones((2, 6)), image=np.ones((2, 768)), length=np.array([3, 2]))
        >>> args = {"max_tokens_per_microbatch": 8, "sequence_length_round": 1}
        >>> (shard,), _ = batch.shard_by_batch_size(
        ...     1, dynamic_batching_args={**args, "input_key": "tokens", "input_lengths_key": "length"}
        ... )
        >>> next(shard.make_microbatch_iterator_with_dynamic_shapes())
        SlicedDataDict(size=2, tokens: numpy float64[2, 3], image: numpy float64[2, 768], length: numpy int64[2])
        """
        whole("sequence_dim", sequence_dim, at_least=1)
        spans = _microbatches.spans(self, _microbatches.DYNAMIC)
        return _microbatches.cut(self, spans, sequence_dim, _microbatches.sequences(self, sequence_dim, sequence_keys))

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """How many microbatches `make_microbatch_iterator_with_dynamic_shapes` gives: the same on all shards.

        Raises:
            ValueError: as it does.
        """
        return len(_microbatches.spans(self, _microbatches.DYNAMIC))

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict[Content]]:
        """The microbatches of packing, as views: the samples of one bin each, still padded and not yet laid end to end.

        Of a shard those of all groups, one group after the other; of a `get_batch` of it those of that group.

        Raises:
            ValueError: at once, if the batch was not planned by packing, or has been changed since.

        >>> batch = BatchedDataDict(tokens=np.ones((4, 6)), length=np.array([6, 2, 3, 5]))
        >>> (shard,), order = batch.shard_by_batch_size(
        ...     1,
        ...     sequence_packing_args={
        ...         "max_tokens_per_microbatch": 8,
        ...         "input_key": "tokens",
        ...         "input_lengths_key": "length",
        ...         "algorithm": "first_fit_decreasing",
        ...         "sequence_length_pad_multiple": 1,
        ...     },
        ... )
        >>> [part["length"].tolist() for part in shard.make_microbatch_iterator_for_packable_sequences()]
        [[6, 2], [5, 3]]
        >>> shard.get_microbatch_iterator_for_packable_sequences_len(), order
        ((2, 8), [0, 1, 3, 2])
        """
        return _microbatches.cut(self, _microbatches.spans(self, _microbatches.PACKED))

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """How many microbatches there are, the same on all shards, and the tokens of this shard's fullest bin.

        Raises:
            ValueError: as `make_microbatch_iterator_for_packable_sequences` does.
        """
        spans = _microbatches.spans(self, _microbatches.PACKED)
        return len(spans), max(tokens for _, _, tokens in spans)

    def pad_to_multiple(self, n: int, mask_key: str = "sample_mask") -> BatchedDataDict[Content]:
        """A new batch with dummy rows up to a multiple of ``n`` samples.

        Dummy rows are copies of the last sample, so valid input, and have 0 in the leaf ``mask_key``. If there is no
        such leaf, one of float32 ones is made. Multiply the loss with it and nothing is trained on them; their
        lengths count like any other when microbatches are planned. `drop_padding` removes them.

        Raises:
            ValueError: an empty batch, or ``n`` below 1.

        >>> padded = BatchedDataDict(x=np.array([1, 2, 3])).pad_to_multiple(2)
        >>> padded["x"].tolist(), padded["sample_mask"].tolist(), padded.drop_padding()["x"].tolist()
        ([1, 2, 3, 3], [1.0, 1.0, 1.0, 0.0], [1, 2, 3])
        """
        data, dummy = _padding.padded(self, n, mask_key)
        new: BatchedDataDict[Content] = BatchedDataDict(data)
        new.padding = dummy
        return new

    def drop_padding(
        self, *, like: Samples[Any] | None = None, mask_key: str | None = None
    ) -> BatchedDataDict[Content]:
        """A new batch without the dummy rows of `pad_to_multiple`, wherever sharding and reordering have put them.

        The batch itself knows its dummy rows, as do all shards, slices and joins made of it. A batch that was made
        anew, say of a worker's results, does not: then say where to look.

        Args:
            like: the padded batch that has the same rows in the same order.
            mask_key: a leaf of this batch; rows in which it is 0 are dropped, whether they are dummies or not.

        Raises:
            ValueError: it is not known which rows are dummies, or of another number of rows.
        """
        real = _padding.real_rows(self, like, mask_key)
        new: BatchedDataDict[Content] = BatchedDataDict(self.select_indices(real).data)
        return new


class SlicedDataDict(BatchedDataDict[Content]):
    """A part of a batch: a shard, a slice, a microbatch. It may share memory with what it was cut from.

    Its attributes are those of a `BatchedDataDict`.

    >>> BatchedDataDict(x=[1, 2, 3]).slice(1, 3)
    SlicedDataDict(size=2, x: list[2])
    """
