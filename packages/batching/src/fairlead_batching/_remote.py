# SPDX-License-Identifier: Apache-2.0
"""A batch in Ray's object store: the handle, whose operations move indices only, and the fetch of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import _indices
from ._args import DynamicBatchingArgs, SequencePackingArgs, as_int
from ._batch import BatchedDataDict, Shardable, SlicedDataDict
from ._leaves import interop, joining, operations
from ._leaves.operations import BoolArray, IntArray
from ._leaves.ragged import RaggedLeaf
from ._plan import PartPlan, ShardPlan, table_html
from ._samples import find_keys, rename_keys


class BatchLostError(RuntimeError):
    """Rows of a `RemoteBatch` are lost, because the process that stored them has ended or its node is gone.

    - keys: the leaves that are lost;
    - rows: the rows of the handle that are lost.
    """

    def __init__(self, message: str, keys: Sequence[str] = (), rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.keys: tuple[str, ...] = tuple(keys)
        self.rows: tuple[int, ...] = tuple(rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.keys, self.rows)


@dataclass(frozen=True, eq=False, repr=False)
class RemoteBatch(Shardable["RemoteBatch"]):
    """A handle to a batch whose leaves are in Ray's object store, in one or several pieces.

    The handle holds indices, so sharding, selecting, shuffling and joining move no leaf, and a handle is small enough
    to be an argument or a result. `fetch` gathers its rows where it is called. The leaves live as long as a handle to
    them does, and as the process that stored them.

    - stored: for each piece, which are rows that were stored together, the references to its leaves by their keys;
    - pieces, rows: for each sample, the piece that holds it, and its row there;
    - lengths_key, lengths: the leaf with the lengths of sequences, and its values; None if `put` was not told;
    - widths: dim 1 of each leaf that has one;
    - meta, padding: as those of a `BatchedDataDict`;
    - plan: that of a shard, which `fetch` sets on the batch that it returns.
    """

    stored: tuple[dict[str, Any], ...]
    pieces: IntArray
    rows: IntArray
    lengths_key: str | None = None
    lengths: IntArray | None = None
    widths: dict[str, int] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    padding: BoolArray | None = None
    plan: PartPlan = field(default_factory=PartPlan)

    @classmethod
    def put(
        cls, batch: Mapping[str, Any], *, lengths_key: str | None = None, rows_per_object: int | None = None
    ) -> RemoteBatch:
        """Store each leaf of a batch once, and return the handle.

        Args:
            batch: the batch, or a mapping of leaves. A plan of microbatches is kept.
            lengths_key: the leaf with the lengths of sequences, which stay with the handle for planning.
            rows_per_object: stores the leaves in pieces of so many rows. Ray sends whole objects to other nodes, so
                pieces of the size of a shard send each node its own rows only. By default a leaf is one object.

        Raises:
            ImportError: Ray is not installed.
            RuntimeError: this process is not connected to Ray.
            ValueError: leaves disagree, or cannot be stored; or ``lengths_key`` is not a leaf of whole numbers.
        """
        ray = _require_ray()
        given: BatchedDataDict[Any] = batch if isinstance(batch, BatchedDataDict) else BatchedDataDict(batch)
        size, lengths = given.size, None
        if lengths_key is not None:
            if lengths_key not in given:
                raise ValueError(f"Unknown lengths_key {lengths_key!r}; the batch has {sorted(given)}.")
            lengths = operations.to_integers(lengths_key, given[lengths_key]).copy()
        step = max(size, 1) if rows_per_object is None else as_int("rows_per_object", rows_per_object, at_least=1)
        stored = []
        for start in range(0, max(size, 1), step):
            piece = given if step >= size else given.slice(start, min(start + step, size))
            # Readers copy their rows out of the views.
            stored.append({key: ray.put(BatchedDataDict({key: leaf}).read_only()) for key, leaf in piece.data.items()})
        widths = {key: int(leaf.shape[1]) for key, leaf in given.data.items() if getattr(leaf, "ndim", 0) > 1}
        pieces, rows = np.divmod(np.arange(size), step)
        return cls(
            tuple(stored), pieces, rows, lengths_key, lengths, widths, dict(given.meta), given.padding, given.plan
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.rows)

    def keys(self) -> list[str]:
        """Return the keys of the leaves."""
        return list(self.stored[0])

    def __repr__(self) -> str:
        return f"RemoteBatch(size={self.size}, keys={self.keys()}, pieces={len(self.stored)})"

    def _repr_html_(self) -> str:
        rows = [(key, self.widths.get(key, "")) for key in self.keys()]
        return table_html(f"RemoteBatch of {self.size} samples in {len(self.stored)} pieces", [("key", "width"), *rows])

    def _take(self, indices: IntArray, plan: PartPlan | None = None) -> RemoteBatch:
        """Return the handle to the rows at ``indices``, without the pieces that it does not need any more."""
        used, pieces = np.unique(self.pieces[indices], return_inverse=True)
        return replace(
            self,
            stored=tuple(self.stored[number] for number in used) or self.stored[:1],
            pieces=pieces.reshape(-1),
            rows=self.rows[indices],
            lengths=None if self.lengths is None else self.lengths[indices],
            padding=None if self.padding is None else self.padding[indices],
            meta=dict(self.meta),
            plan=plan or PartPlan(),
        )

    def select_indices(self, indices: Iterable[int]) -> RemoteBatch:
        """Return the handle to the samples at ``indices``; ValueError if there is no such sample. A plan is dropped."""
        return self._take(_indices.check(indices, self.size))

    def slice(self, start: int, end: int) -> RemoteBatch:
        """Return the handle to the samples from ``start`` up to ``end``; ValueError if there are no such samples."""
        _indices.check_span(start, end, self.size)
        return self._take(np.arange(start, end))

    def shuffle(self, seed: int) -> RemoteBatch:
        """Return the handle to the samples in the order of `BatchedDataDict.shuffle`. A plan is dropped."""
        return self._take(_indices.shuffle(seed, self.size))

    def reorder_data(self, indices: Iterable[int]) -> RemoteBatch:
        """Return the handle with sample i at position ``indices[i]``, which undoes a sort. A plan is dropped.

        Raises:
            ValueError: ``indices`` is not a permutation of all samples.
        """
        return self._take(_indices.invert(indices, self.size))

    def select(self, keys: str | Iterable[str]) -> RemoteBatch:
        """Return the handle to the named leaves; ValueError if there is no such leaf. A plan is kept."""
        return self._name({key: key for key in find_keys(self.keys(), keys)})

    def drop(self, keys: str | Iterable[str]) -> RemoteBatch:
        """Return the handle without the named leaves; ValueError if there is no such leaf. A plan is kept."""
        dropped = set(find_keys(self.keys(), keys))
        return self.select([key for key in self.keys() if key not in dropped])

    def rename(self, names: Mapping[str, str]) -> RemoteBatch:
        """Return the handle to leaves with the new names, by the old ones. A plan follows them, as in a batch.

        Raises:
            ValueError: there is no such leaf, or two leaves would have the same name.
        """
        renamed = dict(zip(self.keys(), rename_keys(self.keys(), names), strict=True))
        return replace(self._name(renamed), plan=self.plan.rename(renamed))

    def _name(self, names: dict[str, str]) -> RemoteBatch:
        """Return the handle to some leaves, with the given names by their present ones."""
        stored = tuple({new: piece[key] for key, new in names.items()} for piece in self.stored)
        widths = {names[key]: width for key, width in self.widths.items() if key in names}
        lengths_key = names.get(self.lengths_key or "", self.lengths_key)
        return replace(self, stored=stored, widths=widths, lengths_key=lengths_key, meta=dict(self.meta))

    def _read_lengths(
        self, args: DynamicBatchingArgs | SequencePackingArgs | None
    ) -> tuple[int | IntArray, int | None]:
        if args is None:
            return self.size, None
        if self.lengths is None or self.lengths_key != args.input_lengths_key:
            raise ValueError(
                f"The handle has the lengths of {self.lengths_key!r}, and the plan needs those of "
                f"{args.input_lengths_key!r}: RemoteBatch.put(batch, lengths_key={args.input_lengths_key!r})."
            )
        if args.input_key not in self.keys():
            raise ValueError(f"Unknown input_key {args.input_key!r}; the batch has {sorted(self.keys())}.")
        return self.lengths, self.widths.get(args.input_key)

    def shard(self, plan: ShardPlan) -> list[RemoteBatch]:
        """Return one handle for each shard of a plan. The errors are those of `BatchedDataDict.shard`."""
        key, width = None, None
        if plan.args is not None:
            key, width = plan.args.input_lengths_key, self.widths.get(plan.args.input_key)
        plan.check(self.size, self.lengths if key == self.lengths_key else None, width)
        return self._apply(plan)

    def _apply(self, plan: ShardPlan) -> list[RemoteBatch]:
        return [self._take(samples, plan.part(number)) for number, samples in enumerate(plan.samples)]

    @classmethod
    def concat(cls, batches: Iterable[RemoteBatch]) -> RemoteBatch:
        """Return the handle to all samples of all handles, one after the other. A plan is dropped.

        Raises:
            TypeError: one is not a `RemoteBatch`.
            ValueError: there are none, their keys differ, or their ``meta`` has different values.
        """
        given = list(batches)
        if not given:
            raise ValueError("There are no batches to join.")
        for number, batch in enumerate(given):
            if not isinstance(batch, RemoteBatch):
                raise TypeError(f"Batch {number} must be a RemoteBatch, found {type(batch).__name__}: put() it first.")
            if different := set(batch.keys()) ^ set(given[0].keys()):
                raise ValueError(f"Batches 0 and {number} differ in keys: only one of them has {sorted(different)}.")
        stored: dict[tuple[Any, ...], dict[str, Any]] = {}  # each piece once, by its references
        for piece in (piece for batch in given for piece in batch.stored):
            stored.setdefault(_identify(piece), piece)
        places = {identity: at for at, identity in enumerate(stored)}
        pieces = [np.array([places[_identify(piece)] for piece in batch.stored])[batch.pieces] for batch in given]
        sizes = [batch.size for batch in given]
        keys = {batch.lengths_key for batch in given}
        lengths = [batch.lengths for batch in given if batch.lengths is not None]
        known = len(keys) == 1 and len(lengths) == len(given)
        return cls(
            tuple(stored.values()),
            np.concatenate(pieces),
            np.concatenate([batch.rows for batch in given]),
            keys.pop() if known else None,
            np.concatenate(lengths) if known else None,
            {key: max(batch.widths.get(key, 0) for batch in given) for key in given[0].widths},
            joining.join_meta([batch.meta for batch in given]),
            joining.join_padding([batch.padding for batch in given], sizes),
        )

    def fetch(
        self,
        keys: str | Iterable[str] | None = None,
        *,
        pad_value_dict: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> SlicedDataDict[Any]:
        """Return the samples of this handle in the memory of this process, with the plan of the handle.

        Args:
            keys: the leaves to fetch; by default all.
            pad_value_dict: where pieces differ in dim 1, the values to pad with, as in `BatchedDataDict.from_batches`.
            timeout_s: how long to wait for the leaves.

        Raises:
            ImportError, RuntimeError: Ray is not installed, or this process is not connected to it.
            BatchLostError: the process that stored rows has ended, or their node is gone.
            TimeoutError: the leaves did not arrive in time.
            ValueError: there is no such leaf.
        """
        wanted = self if keys is None else self.select(keys)
        refs = [(number, key, ref) for number, piece in enumerate(wanted.stored) for key, ref in piece.items()]
        read: list[dict[str, Any]] = [{} for _ in wanted.stored]
        for (number, key, _), batch in zip(refs, self._get(refs, timeout_s), strict=True):
            (read[number][key],) = batch.values()  # under the name that it had when it was stored
        where = [np.flatnonzero(self.pieces == number) for number in range(len(read))]
        parts = [
            SlicedDataDict({key: _copy_rows(leaf, self.rows[mine]) for key, leaf in leaves.items()})
            for leaves, mine in zip(read, where, strict=True)
        ]
        batch = parts[0]
        if len(parts) > 1:
            batch = SlicedDataDict.from_batches(parts, pad_value_dict).reorder_data(np.concatenate(where).tolist())
        batch.meta, batch.padding, batch.plan = dict(self.meta), self.padding, self.plan
        return batch

    def _get(self, refs: Sequence[tuple[int, str, Any]], timeout_s: float) -> list[Any]:
        ray = _require_ray()
        try:
            values: list[Any] = ray.get([ref for _, _, ref in refs], timeout=timeout_s)
            return values
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"Leaves {sorted({key for _, key, _ in refs})} of {self.size} rows did not arrive in {timeout_s} s. "
                f"Give fetch() more time, timeout_s=..., or look for a node that does not answer."
            ) from error
        except ray.exceptions.ObjectLostError as error:
            lost = getattr(error, "object_ref_hex", None)
            found = [(number, [key]) for number, key, ref in refs if ref.hex() == lost]
            piece, keys = found[0] if found else (None, sorted({key for _, key, _ in refs}))
            rows = np.arange(self.size) if piece is None else np.flatnonzero(self.pieces == piece)
            raise BatchLostError(
                f"Leaves {keys} are lost in {rows.size} of {self.size} rows, from row {min(rows, default=0)} on: the "
                f"process that stored them has ended, or their node is gone. Keep that process alive while others "
                f"fetch, or let one that stays, such as the driver, put() the batch.",
                keys,
                rows.tolist(),
            ) from error


def _identify(piece: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(piece[key] for key in sorted(piece))


def _copy_rows(leaf: Any, rows: IntArray) -> Any:
    """Return a copy of the rows, because the leaf is a view of the store."""
    taken = operations.take(leaf, rows)
    return taken.compact(copy=True) if isinstance(taken, RaggedLeaf) else taken


def _require_ray() -> Any:
    ray = interop.require("ray", "RemoteBatch needs Ray", "'fairlead-batching[ray]'")
    if not ray.is_initialized():
        raise RuntimeError("RemoteBatch needs a connection to Ray: call ray.init() or fairlead_placement.init_ray().")
    return ray
