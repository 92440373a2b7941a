# SPDX-License-Identifier: Apache-2.0
"""The plan of all shards: which samples each has, in which order and in which microbatches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from ._args import MicrobatchArgs, SequencePackingArgs, as_int
from ._leaves.interop import IntArray
from ._packing.algorithms import Costs

Cuts = list[list[list[int]]]  # per group, per microbatch: [start, end] within the group's part of the shard
Lengths = list[list[int]]  # per group, per microbatch: padded length, or tokens of the bin
PlannedBy = Literal["dynamic_batching_args", "sequence_packing_args"]
Span = tuple[int, int, int]  # start, end, and padded length or tokens
Sizes = tuple[int, IntArray | None, int | None]  # samples, their lengths, width of sequences; None if unknown


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Which samples each shard has, in which order and in which microbatches. `plan_shards` makes it from lengths.

    `BatchedDataDict.shard` applies it to a batch. It does not refer to any data, and can be pickled.

    - samples: for each shard, its samples as indices into the batch, in order;
    - micro_batch_indices, micro_batch_lengths: for each shard, its attributes of these names; None without
      microbatches;
    - args: the arguments of the microbatches; None without;
    - lengths: the length of each sample; None if the plan was made from a number of samples;
    - costs: the cost of each sample; None without ``cost`` in the arguments.

    >>> print(ShardPlan((np.array([1, 3]), np.array([2, 0])), lengths=np.array([6, 2, 3, 5])))
    4 samples over 2 shards
    shard  samples  tokens
        0        2       7
        1        2       9
    """

    samples: tuple[IntArray, ...]
    micro_batch_indices: list[Cuts] | None = None
    micro_batch_lengths: list[Lengths] | None = None
    args: MicrobatchArgs | None = None
    lengths: IntArray | None = None
    costs: Costs | None = None

    @property
    def size(self) -> int:
        """The number of samples."""
        return sum(map(len, self.samples))

    @cached_property
    def order(self) -> IntArray:
        """The samples of all shards, one shard after the other. ``reorder_data(plan.order)`` undoes it."""
        return np.concatenate(self.samples)

    @property
    def microbatches(self) -> list[list[IntArray]]:
        """For each shard, the samples of each of its microbatches, over all groups.

        Raises:
            ValueError: the plan has no microbatches.
        """
        if self.micro_batch_indices is None:
            raise ValueError("The plan has no microbatches: make it with dynamic_batching_args or packing arguments.")
        parts = []
        for samples, cuts in zip(self.samples, self.micro_batch_indices, strict=True):
            counts = [end - start for group in cuts for start, end in group]
            parts.append(np.split(samples, list(accumulate(counts))[:-1]))
        return parts

    def total_costs(self) -> list[float]:
        """Return the cost of each shard; without a cost, its tokens; without lengths, its samples."""
        each = self.lengths if self.costs is None else self.costs
        return [float(len(part) if each is None else each[part].sum()) for part in self.samples]

    @property
    def imbalance(self) -> float:
        """The most expensive shard's cost divided by the mean; 1 is perfect."""
        totals = self.total_costs()
        return max(totals) * len(totals) / sum(totals) if any(totals) else 1.0

    def check(self, size: int, lengths: IntArray | None, width: int | None = None) -> None:
        """Refuse a batch that this plan was not made for. The lengths, and the width of sequences, are None if unknown.

        Raises:
            ValueError: it has another number of samples, other lengths, or sequences narrower than a length.
        """
        remedy = "Plan it again: plan_shards() with the lengths of this batch."
        if size != self.size:
            raise ValueError(f"The plan is of another batch: it has {self.size} samples, the batch {size}. {remedy}")
        if lengths is not None and self.lengths is not None and (lengths != self.lengths).any():
            row = int(np.flatnonzero(lengths != self.lengths)[0])
            raise ValueError(
                f"The plan is of another batch: sample {row} has {self.lengths[row]} tokens in the plan, and "
                f"{lengths[row]} by {self.args.input_lengths_key if self.args else 'the batch'!r}. {remedy}"
            )
        if self.args is not None and self.lengths is not None:
            check_lengths(self.lengths, width, self.args.input_key, self.args.input_lengths_key)

    def part(self, shard: int) -> "PartPlan":
        """Return the plan of one shard, which `BatchedDataDict.shard` sets on it."""
        sizes = list(map(len, self.samples))
        all_sizes = sizes if len(set(sizes)) > 1 else None
        if self.args is None or self.micro_batch_indices is None or self.micro_batch_lengths is None:
            return PartPlan(shard_sizes=all_sizes)
        return PartPlan(self.args, self.micro_batch_indices[shard], self.micro_batch_lengths[shard], all_sizes)

    def _table(self) -> list[list[str]]:
        columns: dict[str, Iterable[Any]] = {"shard": range(len(self.samples)), "samples": map(len, self.samples)}
        if self.micro_batch_indices is not None:
            columns["microbatches"] = [sum(map(len, cuts)) for cuts in self.micro_batch_indices]
        if self.lengths is not None:
            columns["tokens"] = [self.lengths[part].sum() for part in self.samples]
        if self.costs is not None:
            columns["cost"] = [f"{cost:.4g}" for cost in self.total_costs()]
        return [[name, *map(str, values)] for name, values in columns.items()]

    def __str__(self) -> str:
        caption = f"{self.size} samples over {len(self.samples)} shards"
        if self.costs is not None:
            caption += f", the most expensive {self.imbalance:.4f}x the mean"
        columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in self._table()]
        return "\n".join([caption, *map("  ".join, zip(*columns, strict=True))])


@dataclass(frozen=True)
class PartPlan:
    """The plan of a shard. A microbatch keeps the arguments only, and any other part at most `shard_sizes`."""

    args: MicrobatchArgs | None = None
    micro_batch_indices: Cuts | None = None
    micro_batch_lengths: Lengths | None = None
    shard_sizes: list[int] | None = None

    @property
    def elem_counts_per_gb(self) -> list[int] | None:
        packs = isinstance(self.args, SequencePackingArgs)
        return [cuts[-1][1] for cuts in self.micro_batch_indices] if packs and self.micro_batch_indices else None

    def select_group(self, number: int) -> tuple[int, int, "PartPlan"]:
        """Return where a group starts and ends in the shard, and its plan."""
        cuts, lengths = self.micro_batch_indices or [], self.micro_batch_lengths or []
        if number >= len(cuts):
            raise ValueError(f"There is no group {number}: the plan has {len(cuts)}.")
        start = sum(group[-1][1] for group in cuts[:number])
        sizes = self.shard_sizes if len(cuts) == 1 else None
        return start, start + cuts[number][-1][1], PartPlan(self.args, [cuts[number]], [lengths[number]], sizes)

    def find_spans(self, size: int, planned_by: PlannedBy, lengths: IntArray | None) -> list[Span]:
        """Return all planned microbatches of a shard of ``size`` samples, over all groups.

        The lengths are checked unless they are None, which means unknown.
        """
        cuts, planned = self.micro_batch_indices, self.micro_batch_lengths
        if self.args is None or cuts is None or planned is None:
            raise ValueError(
                f"The batch has no planned microbatches: get it by shard_by_batch_size(..., {planned_by}=...)."
            )
        actual = "sequence_packing_args" if isinstance(self.args, SequencePackingArgs) else "dynamic_batching_args"
        if actual != planned_by:
            raise ValueError(f"The microbatches of this batch were planned by {actual}, not by {planned_by}.")
        spans: list[Span] = []
        first = 0
        for own_cuts, own_lengths in zip(cuts, planned, strict=True):
            spans += [(first + start, first + end, n) for (start, end), n in zip(own_cuts, own_lengths, strict=True)]
            first = spans[-1][1]
        if first != size:
            raise ValueError(f"Microbatches were planned for {first} samples, and the batch has {size}.")
        if lengths is not None:
            self._check_spans(spans, lengths, self.args)
        return spans

    def _check_spans(self, spans: list[Span], lengths: IntArray, args: MicrobatchArgs) -> None:
        """Refuse lengths of which a microbatch would lose tokens, or which fill a bin otherwise than planned."""
        starts, planned = [start for start, _, _ in spans], np.array([tokens for _, _, tokens in spans])
        if isinstance(args, SequencePackingArgs):
            actual = np.add.reduceat(round_up(lengths, args.sequence_length_pad_multiple), starts)
            wrong = actual != planned
        else:
            actual = np.maximum.reduceat(lengths, starts)
            wrong = actual > planned
        if wrong.any():
            number = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"Microbatches were planned for other lengths: microbatch {number} for {planned[number]} tokens, and "
                f"it has {actual[number]} by {args.input_lengths_key!r}. Shard the batch again after such a change."
            )

    def find_equal_spans(self, size: int, samples: int, name: str = "microbatch_size") -> list[Span]:
        """Return parts of ``samples`` samples each, after checking that every shard has as many."""
        samples = as_int(name, samples, at_least=1)
        if self.elem_counts_per_gb is not None:
            raise ValueError(
                "After packing, shards have different numbers of samples, so ranks would have different numbers of "
                "microbatches and wait for each other for ever: use make_microbatch_iterator_for_packable_sequences()."
            )
        if sizes := self.shard_sizes:
            least, most = min(sizes), max(sizes)
            if -(-least // samples) != -(-most // samples):
                raise ValueError(
                    f"Shards of {least} to {most} samples have different numbers of microbatches of {samples}, so "
                    f"ranks would wait for each other for ever: use pad_to_multiple before sharding."
                )
        elif not size:
            raise ValueError("An empty batch has no microbatches: it has 0 samples.")
        elif size % samples:
            raise ValueError(f"{size} samples are not a multiple of {name}={samples}: use pad_to_multiple({samples}).")
        return [(start, min(start + samples, size), 0) for start in range(0, size, samples)]

    def resize(self, resize: Callable[[int], int]) -> "PartPlan":
        """Return the sizes of all shards after the same change of each, given how it changes a size."""
        sizes = [resize(size) for size in self.shard_sizes or ()]
        return PartPlan(shard_sizes=sizes if len(set(sizes)) > 1 else None)

    def rename(self, names: Mapping[str, str]) -> "PartPlan":
        """Return the plan with the new names of the leaves."""
        if self.args is None:
            return self
        keys = {name: getattr(self.args, name) for name in ("input_key", "input_lengths_key")}
        return replace(self, args=replace(self.args, **{name: names.get(key, key) for name, key in keys.items()}))


def check_lengths(lengths: IntArray, width: int | None, key: str, lengths_key: str) -> None:
    """Refuse lengths that are negative, or larger than the width of the leaf of sequences, if that is known."""
    wrong = lengths < 0 if width is None else (lengths < 0) | (lengths > width)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        expected = "lengths are at least 0" if width is None else f"{key!r} has width {width}"
        raise ValueError(f"{lengths_key!r} says that sample {index} has {lengths[index]} tokens; {expected}.")


def round_up(lengths: IntArray, multiple: int) -> IntArray:
    """Return the next multiples of the lengths; ValueError if one does not fit into int64."""
    longest = int(lengths.max(initial=0))
    if -(-longest // multiple) * multiple > np.iinfo(np.int64).max:
        raise ValueError(f"{longest} tokens cannot be padded to a multiple of {multiple}: that is beyond int64.")
    return -(-lengths // multiple) * multiple
