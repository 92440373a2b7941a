# SPDX-License-Identifier: Apache-2.0
"""A dictionary of batched values: slices, shards for all ranks, microbatches, and the way back to the order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np

from . import _gathering, _packed
from ._args import DynamicBatchingArgs, MicrobatchArgs, SequencePackingArgs, as_int, read_args
from ._leaves import interop, operations
from ._leaves.ragged import RaggedLeaf
from ._packed import PackedBatch
from ._plan import PartPlan, PlannedBy, ShardPlan, Sizes, Span
from ._planner import plan_shards
from ._samples import Content, Samples

Part = TypeVar("Part")


class Shardable(Generic[Part]):
    """The base of what can be sharded: a batch, or a handle to one."""

    def _read_sizes(self, args: MicrobatchArgs | None, needed: bool = False) -> Sizes:
        """Return what a plan of the samples depends on; ValueError if anything that is needed is unknown."""
        raise NotImplementedError

    def _split(self, plan: ShardPlan) -> list[Part]:
        """Return the shards of a plan that was checked."""
        raise NotImplementedError

    def shard(self, plan: ShardPlan) -> list[Part]:
        """Return the shards of a plan that `plan_shards` made. A batch copies each leaf in one gather; a handle, none.

        Raises:
            ValueError: the plan is of another batch: of another number of samples, or of other lengths; or a length is
                larger than the width of the sequences.

        >>> from fairlead_batching import plan_shards
        >>> batch = BatchedDataDict(x=np.array([10, 20, 30, 40]))
        >>> [shard["x"].tolist() for shard in batch.shard(plan_shards(4, shards=2))]
        [[10, 20], [30, 40]]
        """
        plan.check(*self._read_sizes(plan.args))
        return self._split(plan)

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: None = None,
        sequence_packing_args: None = None,
    ) -> list[Part]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
        sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    ) -> tuple[list[Part], Order]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
        sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    ) -> list[Part] | tuple[list[Part], Order]:
        """Return one batch for each of ``shards`` ranks. Leaves are copied, each in one gather.

        Samples are split into groups of ``batch_size``, and each group over all shards: shard s is piece s of every
        group, one after the other. A group holds the samples of one optimizer step of all ranks together.

        - By default each group is cut into equal pieces.
        - With ``dynamic_batching_args`` the samples of a group are sorted by length (stable) and dealt to the shards in
          turn. Microbatches are cut by tokens, at the same positions in all shards, according to the longest sample of
          all shards at each position.
        - With ``sequence_packing_args`` the samples of a group are packed into a multiple of ``shards`` bins, which
          are dealt to the shards in turn.

        After dynamic batching and packing every shard has the same number of microbatches in every group.

        Args:
            shards: the number of ranks.
            batch_size: the number of samples in a group; by default there is one group.
            allow_uneven_shards: gives leading shards one more sample, if there is one group.
            dynamic_batching_args: how to cut microbatches by tokens; or a mapping with the same names.
            sequence_packing_args: how to pack microbatches; or a mapping with the same names. Not both.

        Returns:
            The shards; after dynamic batching and packing also the `Order` that restores the order of the batch.

        Raises:
            ValueError: the batch is empty, sizes are not multiples of each other, leaves or lengths disagree, a
                sequence is longer than a microbatch, or there are too few samples for all shards to have a microbatch.

        >>> batch = BatchedDataDict(x=list("AABBCCDD"))
        >>> [shard["x"] for shard in batch.shard_by_batch_size(shards=2, batch_size=2)]
        [['A', 'B', 'C', 'D'], ['A', 'B', 'C', 'D']]
        """
        planned_by = dynamic_batching_args, sequence_packing_args
        size, lengths, width = self._read_sizes(read_args(*planned_by), needed=True)
        each = size if lengths is None else lengths
        plan = plan_shards(each, shards, batch_size, allow_uneven_shards, *planned_by, width=width)
        parts = self._split(plan)
        return parts if plan.args is None else (parts, Order(plan.order.tolist()))


class BatchedDataDict(Samples[Content], Shardable["SlicedDataDict[Content]"]):
    """A dictionary of *leaves*: arrays, tensors, lists and `RaggedLeaf`, whose first dim is the sample.

    It is an ordinary mutable dictionary; leaves are checked when they are used together. ``BatchedDataDict[T]`` tells
    people and type checkers what the keys are.

    >>> batch = BatchedDataDict(tokens=np.array([[1, 2, 3], [4, 0, 0]]), length=np.array([3, 1]), name=["a", "b"])
    >>> batch.size
    2
    >>> batch.slice(1, 2)
    SlicedDataDict(size=1, tokens: numpy int64[1, 3], length: numpy int64[1], name: list[1])

    Planning sets ``plan`` on a shard, and with it ``micro_batch_indices``, ``micro_batch_lengths`` and
    ``elem_counts_per_gb``. Its attributes are None on any other batch:

    - plan: ``plan.args``, the arguments of the microbatches; ``plan.shard_sizes``, the samples of all shards, if these
      differ, which is kept where the order or the number of samples changes on all shards alike;
      ``plan.micro_batch_indices`` and ``plan.micro_batch_lengths``.

    ``data`` is the plain dictionary of the leaves. A mapping of leaves is stored by dotted keys: ``batch["image"] =
    {"patches": ...}`` sets ``batch["image.patches"]``. ``meta`` is a dictionary of values that are not per sample:
    parts of the batch have a copy of it, and batches with different values are not joined. ``padding`` says for each
    sample whether it is a dummy row (None: never padded), and follows the samples.

    Pickling is by protocol 5, with one copy of the memory. A reader gets a private copy of each torch tensor. Gradients
    are not transferred.
    """

    def slice(self, start: int, end: int) -> SlicedDataDict[Content]:
        """Return the samples from ``start`` up to ``end``, as views; ValueError unless 0 <= start <= end <= size."""
        size = self.size
        if not 0 <= start <= end <= size:
            raise ValueError(f"There is no slice from {start} to {end} of {size} samples.")
        return self._derive(lambda leaf: operations.cut(leaf, start, end), SlicedDataDict)

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[Content]:
        """Return piece ``rank`` of ``chunks`` equal ones, as views; ValueError if there is no such piece.

        >>> BatchedDataDict(x=[1, 2, 3, 4]).chunk(1, chunks=2)["x"]
        [3, 4]
        """
        size = self.size
        rank, chunks = as_int("rank", rank, at_least=0), as_int("chunks", chunks, at_least=1)
        if size % chunks:
            raise ValueError(f"{size} samples are not a multiple of chunks={chunks}: use pad_to_multiple({chunks}).")
        if rank >= chunks:
            raise ValueError(f"There is no chunk {rank} of {chunks}.")
        return self.slice(rank * size // chunks, (rank + 1) * size // chunks)

    def select_indices(self, indices: Iterable[int]) -> SlicedDataDict[Content]:
        """Return copies of the samples at ``indices``, in that order; ValueError if there is no such sample."""
        size, where = self.size, operations.to_integers("indices", indices)
        if wrong := where[(where < 0) | (where >= size)].tolist():
            raise ValueError(f"There are {size} samples, so none at {wrong[:10]}.")
        return self._derive(lambda leaf: operations.take(leaf, where), SlicedDataDict)

    def minibatches(self, size: int, *, epochs: int = 1, seed: int | None = None) -> Iterator[SlicedDataDict[Content]]:
        """Return batches of ``size`` samples for the optimizer's steps, without the plan of this batch.

        Args:
            epochs: how often each sample occurs.
            seed: shuffles the samples in each epoch, differently in each. By default their order is kept.

        Raises:
            ValueError: at once, if the samples cannot be divided like this, or if ranks would have different numbers
                of minibatches.

        >>> [part["x"] for part in BatchedDataDict(x=[1, 2, 3, 4]).minibatches(2, epochs=2)]
        [[1, 2], [3, 4], [1, 2], [3, 4]]
        """
        plan, spans = self.plan, self.plan.find_equal_spans(self.size, size, name="size")
        epochs = as_int("epochs", epochs, at_least=1)
        seeds = [None if seed is None else [as_int("seed", seed, at_least=0), epoch] for epoch in range(epochs)]
        count = self.size

        def resize(start: int) -> PartPlan:
            return plan.resize(lambda of_shard: min(of_shard - start, size))

        def select() -> Iterator[SlicedDataDict[Content]]:
            for of_epoch in seeds:
                order = None if of_epoch is None else np.random.default_rng(of_epoch).permutation(count)
                for start, end, _ in spans:
                    part = self.slice(start, end) if order is None else self.select_indices(order[start:end])
                    part.plan = resize(start)
                    yield part

        return select()

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[Content]:
        """Return group ``batch_idx`` of a shard, or the samples from ``batch_idx * batch_size`` on, as views.

        After dynamic batching or packing the plan determines the size of the group, ``batch_size`` is ignored, and the
        group keeps its part of the plan. Without a plan the last batch may be smaller.

        Raises:
            ValueError: there is no such group or batch, or ``batch_size`` is missing.
        """
        size = self.size
        batch_idx = as_int("batch_idx", batch_idx, at_least=0)
        if self.plan.micro_batch_indices is None:
            if batch_size is None:
                raise ValueError("batch_size is needed: no plan determines the size of groups.")
            batch_size = as_int("batch_size", batch_size, at_least=1)
            start = batch_idx * batch_size
            if start >= size:
                raise ValueError(f"There is no batch {batch_idx} of {batch_size} among {size} samples.")
            sizes = self.plan.resize(lambda of_shard: min(max(of_shard - start, 0), batch_size))
            return _cut(self, start, min(start + batch_size, size), sizes)
        return _cut(self, *self.plan.select_group(batch_idx))

    def _split(self, plan: ShardPlan) -> list[SlicedDataDict[Content]]:
        gathered = self._derive(lambda leaf: operations.take(leaf, plan.order), SlicedDataDict)
        ends = pairwise(accumulate(map(len, plan.samples), initial=0))
        return [_cut(gathered, start, end, plan.part(number)) for number, (start, end) in enumerate(ends)]

    def _read_sizes(self, args: MicrobatchArgs | None, needed: bool = False) -> Sizes:
        size = self.size
        if args is None or (needed and not size):
            return size, None, None
        for name in ("input_key", "input_lengths_key") if needed else ():
            if (key := getattr(args, name)) not in self:
                raise ValueError(f"Unknown {name} {key!r}; the batch has {sorted(self)}.")
        key = args.input_lengths_key
        leaf: Any = self.get(args.input_key)
        width = int(leaf.shape[1]) if getattr(leaf, "ndim", 0) > 1 else None
        if needed and width is None:
            actual = f"shape {tuple(leaf.shape)}" if hasattr(leaf, "shape") else f"a {type(leaf).__name__}"
            raise ValueError(f"{args.input_key!r} must be an array or tensor of (samples, width, ...), found {actual}.")
        return size, operations.to_integers(key, self[key]) if key in self else None, width

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict[Content]]:
        """Return microbatches of ``microbatch_size`` samples, as views.

        In uneven shards the last microbatch may be smaller, as long as every shard has as many microbatches.

        Raises:
            ValueError: at once, if the samples cannot be divided like this; or if ranks would, or after packing could,
                have different numbers of microbatches, and so wait for each other for ever.

        >>> [part["x"] for part in BatchedDataDict(x=[1, 2, 3, 4]).make_microbatch_iterator(2)]
        [[1, 2], [3, 4]]
        """
        return self._microbatches(self.plan.find_equal_spans(self.size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1, *, sequence_keys: Iterable[str] | None = None
    ) -> Iterator[SlicedDataDict[Content]]:
        """Return the microbatches of dynamic batching, as views, with sequences truncated to the padded length.

        A shard returns those of all groups, one group after the other; a `get_batch` of it those of that group.

        Args:
            sequence_dim: the dim of the leaves that is the sequence, and is truncated.
            sequence_keys: the leaves that are truncated. By default these are the arrays and tensors whose
                ``sequence_dim`` is as wide as dim 1 of the leaf ``input_key`` of the plan. Name them if sequences have
                different widths. Name them too if a leaf of another dtype is as wide: it may be an embedding.

        Raises:
            ValueError: at once, if the batch was not planned by dynamic batching, or has been changed since. Or a leaf
                in ``sequence_keys`` does not exist or has no such dim. Or ``sequence_keys`` is missing, and the leaf
                ``input_key`` is too, or a leaf of another dtype is as wide.
        """
        as_int("sequence_dim", sequence_dim, at_least=1)
        spans = self._find_spans("dynamic_batching_args")
        return self._microbatches(spans, sequence_dim, _packed.find_sequence_keys(self, sequence_dim, sequence_keys))

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of microbatches of `make_microbatch_iterator_with_dynamic_shapes`, equal on all shards.

        Raises:
            ValueError: the batch was not planned by dynamic batching, or has been changed since.
        """
        return len(self._find_spans("dynamic_batching_args"))

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict[Content]]:
        """Return the microbatches of packing, as views: the samples of one bin each, for `to_packed`.

        A shard returns those of all groups, one group after the other; a `get_batch` of it those of that group.

        Raises:
            ValueError: at once, if the batch was not planned by packing, or has been changed since.
        """
        return self._microbatches(self._find_spans("sequence_packing_args"))

    def to_packed(
        self,
        *,
        lengths_key: str | None = None,
        sequence_keys: Iterable[str] | None = None,
        pad_to_multiple: int | None = None,
        pad_value_dict: Mapping[str, Any] | None = None,
    ) -> PackedBatch[Self]:
        """Return all sequences in one row, one after the other, for attention that takes ``cu_seqlens``.

        Args:
            lengths_key: the leaf with the lengths. By default it is that of the plan.
            sequence_keys: the leaves with a value for each token. By default they are found as in
                `make_microbatch_iterator_with_dynamic_shapes`. Name those of another width, such as labels without the
                first token: they would stay as they are.
            pad_to_multiple: each sequence takes up a multiple of this number of tokens. Context parallelism over n
                ranks usually needs 2 * n. By default it is the ``sequence_length_pad_multiple`` of the plan, or 1.
            pad_value_dict: the values to pad with, by key. The default is 0.

        Raises:
            ValueError: the lengths are unknown, or do not fit into a leaf; there is nothing to pack; or a dtype does
                not hold its value to pad with.

        >>> batch = BatchedDataDict(tokens=np.array([[1, 2, 3], [4, 0, 0]]), length=np.array([3, 1]))
        >>> row = batch.to_packed(lengths_key="length", sequence_keys=["tokens"])
        >>> row["tokens"].tolist(), row.cu_seqlens.tolist(), row.position_ids.tolist()
        ([[1, 2, 3, 4]], [0, 3, 4], [[0, 1, 2, 0]])
        >>> row.unpack({"double": 2 * row["tokens"]})["double"].tolist()
        [[2, 4, 6], [8, 0, 0]]
        """
        return _packed.pack(self, lengths_key, sequence_keys, pad_to_multiple, pad_value_dict or {})

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of microbatches, which is equal on all shards, and the tokens of this shard's fullest bin.

        Raises:
            ValueError: the batch was not planned by packing, or has been changed since.
        """
        spans = self._find_spans("sequence_packing_args")
        return len(spans), max(tokens for _, _, tokens in spans)

    def _find_spans(self, planned_by: PlannedBy) -> list[Span]:
        """Return the planned microbatches, after checking that the samples and their lengths are those of the plan."""
        key = self.plan.args.input_lengths_key if self.plan.args else None
        lengths = None if key is None or key not in self else operations.to_integers(key, self[key])
        return self.plan.find_spans(self.size, planned_by, lengths)

    def _microbatches(
        self, spans: Iterable[Span], dim: int = 1, keys: Iterable[str] = ()
    ) -> Iterator[SlicedDataDict[Content]]:
        """Yield the samples of each span, with ``dim`` of the leaves ``keys`` truncated to its length."""
        for start, end, length in spans:
            microbatch = _cut(self, start, end, PartPlan(self.plan.args))
            for key in keys:
                microbatch.data[key] = operations.truncate(microbatch.data[key], dim, length)
            yield microbatch

    def pad_to_multiple(self, n: int, mask_key: str = "sample_mask") -> BatchedDataDict[Content]:
        """Return a new batch with dummy rows up to a multiple of ``n`` samples.

        Dummy rows are copies of the last sample, so valid input, and have 0 in the leaf ``mask_key``. If there is no
        such leaf, one of float32 ones is made. Multiply the loss by it, and nothing is trained on dummy rows. Their
        lengths count like any other when microbatches are planned. `drop_padding` removes them.

        Raises:
            ValueError: the batch is empty, or ``n`` is less than 1.

        >>> padded = BatchedDataDict(x=np.array([1, 2, 3])).pad_to_multiple(2)
        >>> padded["x"].tolist(), padded["sample_mask"].tolist(), padded.drop_padding()["x"].tolist()
        ([1, 2, 3, 3], [1.0, 1.0, 1.0, 0.0], [1, 2, 3])
        """
        n, size = as_int("n", n, at_least=1), self.size
        if not size:
            raise ValueError("An empty batch cannot be padded: it has no sample to copy.")
        extra = -size % n
        padded = self._derive(lambda leaf: operations.pad(leaf, extra), BatchedDataDict)
        if mask_key not in padded:
            tensor = next(filter(interop.is_tensor, self.data.values()), None)
            ones = np.ones(size + extra, dtype=np.float32)
            padded[mask_key] = ones if tensor is None else interop.from_numpy(ones, like=tensor)
        if isinstance(padded[mask_key], RaggedLeaf):
            raise ValueError(f"The mask {mask_key!r} must be a list, an array or a tensor: choose another mask_key.")
        padded[mask_key][size:] = [0] * extra if isinstance(padded[mask_key], list) else 0
        padded.padding = np.arange(size + extra) >= size
        padded.padding[:size] = False if self.padding is None else self.padding
        padded.plan = self.plan.resize(lambda of_shard: of_shard + -of_shard % n)
        return padded

    def drop_padding(
        self, *, like: Samples[Any] | None = None, mask_key: str | None = None
    ) -> BatchedDataDict[Content]:
        """Return a new batch without the dummy rows of `pad_to_multiple`, wherever sharding and reordering put them.

        A padded batch knows its dummy rows, as do all shards, slices and joins made from it. A new batch, such as one
        of a worker's results, does not: use ``like`` or ``mask_key``.

        Args:
            like: the padded batch that has the same rows in the same order.
            mask_key: a leaf of this batch; rows in which it is 0 are dropped, whether they are dummies or not.

        Raises:
            ValueError: it is unknown which rows are dummies, or known for another number of rows.
        """
        padding = (self if like is None else like).padding
        if mask_key is not None:
            if mask_key not in self:
                raise ValueError(f"Unknown mask_key {mask_key!r}; the batch has {sorted(self)}.")
            mask = self[mask_key]
            values = interop.to_numpy(mask.bool()) if interop.is_tensor(mask) else np.asarray(mask)
            padding = np.logical_not(values.any(axis=tuple(range(1, values.ndim))))
        if padding is None:
            raise ValueError(
                "There is no record of which rows are padding. Pass the padded batch that has the same rows, "
                "drop_padding(like=padded), or drop rows by their mask, drop_padding(mask_key='sample_mask')."
            )
        if len(padding) != self.size:
            raise ValueError(f"The batch has {self.size} samples, but the record of padding has {len(padding)}.")
        real = np.flatnonzero(~padding)
        dropped = self._derive(lambda leaf: operations.take(leaf, real), BatchedDataDict)
        dropped.padding = None
        return dropped

    def all_gather(self, group: Any = None) -> Self:
        """Return the samples of all ranks of a torch process group, in the order of ranks, on every rank.

        Ranks may have different numbers of samples; leaves that differ in dim 1 are padded as in `from_batches`.

        Raises:
            ValueError: ranks have different keys, or a key with different kinds, dims, dtypes or devices; or a rank
                cannot send its leaves, or cannot receive those of others. Every rank raises it, and it names the
                ranks that failed.
        """
        return self.from_batches(_gathering.gather(self, group))


def _cut(batch: BatchedDataDict[Content], start: int, end: int, plan: PartPlan) -> SlicedDataDict[Content]:
    """Return a part of a batch, as views, with its own plan."""
    part = batch.slice(start, end)
    part.plan = plan
    return part


class SlicedDataDict(BatchedDataDict[Content]):
    """A part of a batch: a shard, a slice, a microbatch. It may share memory with the batch it was cut from.

    Its attributes are those of a `BatchedDataDict`.
    """


class Order(list[int]):
    """The permutation that `BatchedDataDict.shard_by_batch_size` applied.

    Position i of the shards, one after the other, holds the caller's sample ``order[i]``. It is a plain list of ints,
    so ``BatchedDataDict.from_batches(results).reorder_data(order)`` restores the caller's order, as does `restore`.
    """

    def restore(
        self, results: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, Any] | None = None
    ) -> BatchedDataDict[Any]:
        """Return the shards' results as one batch in the caller's order.

        Args:
            results: one batch per shard, in the order of the shards; their keys may differ from those of the shards.
            pad_value_dict: as in `BatchedDataDict.from_batches`.

        Raises:
            ValueError: the results do not have one sample for each sample of the shards.

        >>> Order([2, 0, 1]).restore([{"loss": [0.3, 0.1]}, {"loss": [0.2]}])["loss"]
        [0.1, 0.2, 0.3]
        """
        batch: BatchedDataDict[Any] = BatchedDataDict.from_batches(results, pad_value_dict)
        if batch.size != len(self):
            raise ValueError(
                f"The shards had {len(self)} samples, but the results have {batch.size}: "
                f"{[BatchedDataDict(result).size for result in results]} by shard."
            )
        return batch.reorder_data(self)
