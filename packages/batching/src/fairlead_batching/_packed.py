# SPDX-License-Identifier: Apache-2.0
"""The sequences of a microbatch in one row, for attention that takes the lengths of sequences instead of padding."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ._args import SequencePackingArgs, as_int
from ._leaves import interop, joining, operations
from ._leaves.interop import IntArray
from ._plan import check_lengths, round_up
from ._samples import Samples

Batch = TypeVar("Batch", bound=Samples[Any])


@dataclass(frozen=True, eq=False)
class PackedBatch(Generic[Batch]):
    """All sequences of a microbatch in one row, one after the other. `BatchedDataDict.to_packed` makes it.

    ``packed[key]`` is a leaf: (1, tokens, ...) if it has a value for each token, otherwise that of the microbatch. The
    attributes of the row have the type and the device of the leaf with the sequences:

    - leaves: all leaves by their keys;
    - token_keys: the keys of those that have a value for each token;
    - position_ids: the position of each token in its sequence (1, tokens), int64;
    - cu_seqlens: the sums of the lengths of the sequences (sequences + 1,), int32, from 0;
    - cu_seqlens_padded: where each sequence starts in the row, and the end of the last (sequences + 1,), int32. It
      equals ``cu_seqlens`` unless sequences are padded to a multiple;
    - max_seqlen: the tokens that the longest sequence takes up in the row;
    - widths: the width of each leaf in ``token_keys`` before packing;
    - pad_values: the value that pads each of them;
    - source: the microbatch without its leaves: its ``meta`` and its record of padding.
    """

    leaves: dict[str, Any]
    token_keys: tuple[str, ...]
    position_ids: Any
    cu_seqlens: Any
    cu_seqlens_padded: Any
    max_seqlen: int
    widths: dict[str, int]
    pad_values: dict[str, Any]
    source: Batch

    def __getitem__(self, key: str) -> Any:
        return self.leaves[key]

    def to(self, device: Any) -> "PackedBatch[Batch]":
        """Return a copy with all tensors on ``device``; arrays and lists are not moved."""
        row = {name: operations.move(getattr(self, name), device) for name in ("position_ids", *_BOUNDS)}
        return replace(self, leaves={key: operations.move(leaf, device) for key, leaf in self.leaves.items()}, **row)

    def unpack(
        self,
        results: Mapping[str, Any] | None = None,
        pad_value_dict: Mapping[str, Any] | None = None,
        *,
        token_keys: Iterable[str] | None = None,
    ) -> Batch:
        """Return leaves as a microbatch again, with sequences side by side and padded on the right.

        Args:
            results: leaves (1, tokens, ...), such as the log-probabilities of the row's tokens, and leaves with one
                entry for each sequence. The default is all leaves of the row.
            pad_value_dict: the values to pad with, by key. The default is that of `to_packed`, or 0.
            token_keys: the results with a value for each token. By default these are the results of shape (1, tokens,
                ...). Name them if the row has one sequence, and a result for it may be as wide as the row.

        Raises:
            ValueError: a leaf has neither a value for each token of the row nor one for each sequence, or its dtype
                does not hold the value to pad with. Or ``token_keys`` has a key that is not a result.
        """
        starts, ends = (operations.to_integers("cu_seqlens", getattr(self, name)) for name in reversed(_BOUNDS))
        lengths, starts = np.diff(ends), starts[:-1]
        tokens = int(np.prod(tuple(self.position_ids.shape)))
        unpacked = {}
        leaves = self.leaves if results is None else results
        given = token_keys if token_keys is not None else self.token_keys if results is None else leaves
        named = {given} if isinstance(given, str) else set(given)
        if unknown := named - set(leaves):
            raise ValueError(f"Unknown token_keys {sorted(unknown)}; the results are {sorted(leaves)}.")
        for key, leaf in leaves.items():
            shape = tuple(getattr(leaf, "shape", ()))
            if shape[:2] != (1, tokens) or key not in named:
                is_named = token_keys is not None and key in named
                if is_named or operations.count_samples({key: leaf}) != len(lengths):
                    raise ValueError(
                        f"Leaf {key!r} must be (1, {tokens}, ...), a value for each token of the row, or have an entry "
                        f"for each of the {len(lengths)} sequences, found {operations.describe(leaf)}."
                    )
                unpacked[key] = leaf
                continue
            width = self.widths.get(key, max(self.widths.values(), default=0))
            column = np.arange(width)
            index = np.where(column < lengths[:, None], starts[:, None] + column, tokens)
            value = (pad_value_dict or {}).get(key, self.pad_values.get(key, 0))
            unpacked[key] = _gather(key, leaf.reshape(tokens, *shape[2:]), index, value)
        return self.source.union(unpacked)


_BOUNDS = ("cu_seqlens", "cu_seqlens_padded")


def pack(
    batch: Batch,
    lengths_key: str | None,
    sequence_keys: Iterable[str] | None,
    multiple: int | None,
    pad_values: Mapping[str, Any],
) -> PackedBatch[Batch]:
    """Return the row of a microbatch; for arguments and errors see `BatchedDataDict.to_packed`."""
    args = batch.plan.args
    planned = args.sequence_length_pad_multiple if isinstance(args, SequencePackingArgs) else 1
    multiple = as_int("pad_to_multiple", planned if multiple is None else multiple, at_least=1)
    key = args.input_lengths_key if lengths_key is None and args else lengths_key
    if key is None or key not in batch:
        raise ValueError(
            f"The lengths of the sequences are unknown: the batch has no leaf {key!r}. Name it: lengths_key=..., one "
            f"of {sorted(batch)}."
        )
    size, lengths = batch.size, operations.to_integers(key, batch[key])
    keys = find_sequence_keys(batch, 1, sequence_keys)
    if not size or not keys:
        raise ValueError(f"There is nothing to pack: the batch has {size} samples, and the leaves of sequences {keys}.")
    widths = {name: int(batch[name].shape[1]) for name in keys}
    for name, width in widths.items():
        check_lengths(lengths, width, name, key)
    if unknown := set(pad_values) - set(keys):
        raise ValueError(f"Unknown keys in pad_value_dict: {sorted(unknown)}; the leaves of sequences are {keys}.")
    taken_up = round_up(lengths, multiple)
    starts = np.append(0, np.cumsum(taken_up))
    if (longest := starts.max()) > np.iinfo(np.int32).max:  # sums of large numbers are negative
        raise ValueError(f"A row of {longest} tokens is too long for cu_seqlens, which is int32: pack fewer samples.")
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], taken_up)
    is_real = positions < np.repeat(lengths, taken_up)
    samples = np.repeat(np.arange(size), taken_up)
    packed = {}
    for name, width in widths.items():
        leaf = batch[name]
        index = np.where(is_real, samples * width + positions, size * width)
        flat = leaf.reshape(size * width, *leaf.shape[2:])
        packed[name] = _gather(name, flat, index[None], pad_values.get(name, 0))
    tensor = batch[keys[0]] if interop.is_tensor(batch[keys[0]]) else None

    def convert(array: IntArray) -> Any:
        return array if tensor is None else interop.from_numpy(array, like=tensor)

    return PackedBatch(
        leaves={**batch.data, **packed},
        token_keys=tuple(keys),
        position_ids=convert(positions[None]),
        cu_seqlens=convert(np.append(0, np.cumsum(lengths)).astype(np.int32)),
        cu_seqlens_padded=convert(starts.astype(np.int32)),
        max_seqlen=int(taken_up.max()),
        widths=widths,
        pad_values=dict(pad_values),
        source=batch.select([]),
    )


def find_sequence_keys(batch: Samples[Any], dim: int, named: Iterable[str] | None) -> list[str]:
    """Return the keys of the leaves whose ``dim`` is the sequence: the named, else those as wide as ``input_key``."""
    dims = {key: getattr(leaf, "ndim", 0) for key, leaf in batch.data.items()}
    if named is not None:
        keys = [named] if isinstance(named, str) else list(named)
        if unknown := [key for key in keys if key not in dims]:
            raise ValueError(f"Unknown sequence_keys {unknown}; the batch has {sorted(dims)}.")
        if flat := [key for key in keys if dims[key] <= dim]:
            raise ValueError(f"Leaves {flat} in sequence_keys have no dim {dim}, so no sequences to truncate.")
        return keys
    input_key = batch.plan.args.input_key if batch.plan.args else None
    if input_key is None or dims.get(input_key, 0) < 2:
        raise ValueError(
            f"The width of sequences is unknown: the batch has no array or tensor of (samples, width, ...) at the "
            f"plan's input_key, {input_key!r}. Name the leaves to truncate: sequence_keys=[...]."
        )
    width, dtype = batch[input_key].shape[1], interop.dtype_name(batch[input_key])
    keys = [name for name, leaf in batch.data.items() if dims[name] > dim and leaf.shape[dim] == width]
    if others := [name for name in keys if interop.dtype_name(batch[name]) != dtype]:
        raise ValueError(
            f"Leaves {others} are as wide as {input_key!r}, but of another dtype: they may be embeddings, or have a "
            f"value for each token. Name the leaves of sequences: sequence_keys=[{input_key!r}, ...]."
        )
    return keys


def _gather(key: str, flat: Any, index: IntArray, value: Any) -> Any:
    """Return rows of a leaf; an index beyond them gives ``value``."""
    if index.size and index.max() == len(flat):
        flat = joining.append(key, flat, value)
    return operations.take(flat, index.ravel()).reshape(*index.shape, *flat.shape[1:])
