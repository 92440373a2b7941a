# SPDX-License-Identifier: Apache-2.0
"""A batch in Ray's object store: the handle, whose operations move indices only, and the fetch of its rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ._args import MicrobatchArgs, as_int
from ._batch import BatchedDataDict, Shardable, SlicedDataDict
from ._leaves import interop, joining, operations
from ._leaves.interop import IntArray
from ._leaves.ragged import RaggedLeaf
from ._plan import ShardPlan, Sizes
from ._samples import find_keys


class BatchLostError(RuntimeError):
    """Rows of a `RemoteBatch` are lost, because the process that stored them has ended or its node is gone.

    - keys: the leaves that are lost;
    - rows: the rows of the handle that are lost.
    """

    def __init__(self, message: str, keys: Sequence[str] = (), rows: Sequence[int] = ()) -> None:
        super().__init__(message, keys, rows)
        self.keys: tuple[str, ...] = tuple(keys)
        self.rows: tuple[int, ...] = tuple(rows)

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, eq=False, repr=False)
class RemoteBatch(Shardable["RemoteBatch"]):
    """A handle to a batch whose leaves are in Ray's object store, in one or several pieces.

    The handle holds indices, so sharding, selecting and joining move no leaf, and a handle is small enough
    to be an argument or a result. `fetch` gathers its rows where it is called. The leaves live as long as a handle to
    them does, and as the process that stored them.

    - stored: for each piece, which are rows that were stored together, the references to its leaves by their keys;
    - rows: for each sample, the ``piece`` that holds it and its ``row`` there; its ``length`` if `put` got the key;
      with the ``meta``, the padding and the plan of the batch;
    - lengths_key: the leaf with the lengths of sequences; None if `put` was not given it;
    - widths: dim 1 of each leaf that has one.
    """

    stored: tuple[dict[str, Any], ...]
    rows: BatchedDataDict[Any]
    lengths_key: str | None = None
    widths: dict[str, int] = field(default_factory=dict)

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
        size = given.size
        if lengths_key is not None and lengths_key not in given:
            raise ValueError(f"Unknown lengths_key {lengths_key!r}; the batch has {sorted(given)}.")
        step = max(size, 1) if rows_per_object is None else as_int("rows_per_object", rows_per_object, at_least=1)
        pieces, places = np.divmod(np.arange(size), step)
        rows: BatchedDataDict[Any] = BatchedDataDict(piece=pieces, row=places)
        if lengths_key is not None:
            rows["length"] = operations.to_integers(lengths_key, given[lengths_key]).copy()
        stored = []
        for start in range(0, max(size, 1), step):
            piece = given if step >= size else given.slice(start, min(start + step, size))
            # Readers copy their rows out of the views.
            batches = {key: BatchedDataDict({key: leaf})._read_only() for key, leaf in piece.data.items()}  # noqa: SLF001
            stored.append({key: ray.put(batch) for key, batch in batches.items()})
        widths = {key: int(leaf.shape[1]) for key, leaf in given.data.items() if getattr(leaf, "ndim", 0) > 1}
        rows.meta, rows.padding, rows.plan = dict(given.meta), given.padding, given.plan
        return cls(tuple(stored), rows, lengths_key, widths)

    def __len__(self) -> int:
        return self.rows.size

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.rows.size

    @property
    def meta(self) -> dict[str, Any]:
        """The values that are not per sample."""
        return self.rows.meta

    def keys(self) -> list[str]:
        """Return the keys of the leaves."""
        return list(self.stored[0])

    def __repr__(self) -> str:
        return f"RemoteBatch(size={self.size}, keys={self.keys()}, pieces={len(self.stored)})"

    def _take(self, rows: BatchedDataDict[Any]) -> RemoteBatch:
        """Return the handle to these rows, without the pieces that it does not need any more."""
        used, pieces = np.unique(rows["piece"], return_inverse=True)
        rows["piece"] = pieces.reshape(-1)
        return replace(self, stored=tuple(self.stored[number] for number in used) or self.stored[:1], rows=rows)

    def select_indices(self, indices: Iterable[int]) -> RemoteBatch:
        """Return the handle to the samples at ``indices``; ValueError if there is no such sample. A plan is dropped."""
        return self._take(self.rows.select_indices(indices))

    def slice(self, start: int, end: int) -> RemoteBatch:
        """Return the handle to the samples from ``start`` up to ``end``; ValueError if there are no such samples."""
        return self._take(self.rows.slice(start, end))

    def _read_sizes(self, args: MicrobatchArgs | None, needed: bool = False) -> Sizes:
        if args is None:
            return self.size, None, None
        has_lengths = self.lengths_key == args.input_lengths_key
        if needed and not has_lengths:
            raise ValueError(
                f"The handle has the lengths of {self.lengths_key!r}, and the plan needs those of "
                f"{args.input_lengths_key!r}: RemoteBatch.put(batch, lengths_key={args.input_lengths_key!r})."
            )
        if needed and args.input_key not in self.keys():
            raise ValueError(f"Unknown input_key {args.input_key!r}; the batch has {sorted(self.keys())}.")
        return self.size, self.rows["length"] if has_lengths else None, self.widths.get(args.input_key)

    def _split(self, plan: ShardPlan) -> list[RemoteBatch]:
        return list(map(self._take, self.rows.shard(plan)))

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
        joining.check_keys([batch.stored[0] for batch in given], [1] * len(given))
        keys = {batch.lengths_key for batch in given}
        known = ["piece", "row", "length"] if len(keys) == 1 and None not in keys else ["piece", "row"]
        stored: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}  # each piece once, by its references
        rows = []
        for batch in given:
            named = [(tuple(piece[key] for key in sorted(piece)), piece) for piece in batch.stored]
            numbers = [stored.setdefault(refs, (len(stored), piece))[0] for refs, piece in named]
            rows.append(batch.rows.select(known))
            rows[-1]["piece"] = np.array(numbers)[batch.rows["piece"]]
        joined: BatchedDataDict[Any] = BatchedDataDict.from_batches(rows)
        widths = {key: max(batch.widths.get(key, 0) for batch in given) for key in given[0].widths}
        return cls(tuple(piece for _, piece in stored.values()), joined, keys.pop() if len(known) > 2 else None, widths)

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
        wanted = self.keys() if keys is None else find_keys(self.keys(), keys)
        refs = [(number, key, piece[key]) for number, piece in enumerate(self.stored) for key in wanted]
        read: list[dict[str, Any]] = [{} for _ in self.stored]
        for (number, key, _), batch in zip(refs, self._get(refs, timeout_s), strict=True):
            read[number][key] = batch[key]
        where = [np.flatnonzero(self.rows["piece"] == number) for number in range(len(read))]
        parts = [
            SlicedDataDict({key: _copy_rows(leaf, self.rows["row"][mine]) for key, leaf in leaves.items()})
            for leaves, mine in zip(read, where, strict=True)
        ]
        batch = parts[0]
        if len(parts) > 1:
            batch = SlicedDataDict.from_batches(parts, pad_value_dict).reorder_data(np.concatenate(where).tolist())
        batch.meta, batch.padding, batch.plan = dict(self.meta), self.rows.padding, self.rows.plan
        return batch

    def _get(self, refs: Sequence[tuple[int, str, Any]], timeout_s: float) -> list[Any]:
        ray = _require_ray()
        try:
            return list(ray.get([ref for _, _, ref in refs], timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"Leaves {sorted({key for _, key, _ in refs})} of {self.size} rows did not arrive in {timeout_s} s. "
                f"Give fetch() more time, timeout_s=..., or look for a node that does not answer."
            ) from error
        except ray.exceptions.ObjectLostError as error:
            lost = getattr(error, "object_ref_hex", None)
            lost_pieces = [(number, [key]) for number, key, ref in refs if ref.hex() == lost]
            piece, keys = lost_pieces[0] if lost_pieces else (None, sorted({key for _, key, _ in refs}))
            rows = np.arange(self.size) if piece is None else np.flatnonzero(self.rows["piece"] == piece)
            raise BatchLostError(
                f"Leaves {keys} are lost in {rows.size} of {self.size} rows, from row {min(rows, default=0)} on: the "
                f"process that stored them has ended, or their node is gone. Keep that process alive while others "
                f"fetch, or let one that stays, such as the driver, put() the batch.",
                keys,
                rows.tolist(),
            ) from error


def _copy_rows(leaf: Any, rows: IntArray) -> Any:
    """Return a copy of the rows, because the leaf is a view of the store."""
    taken = operations.take(leaf, rows)
    if isinstance(taken, RaggedLeaf):
        return taken.compact(copy=True)
    # The objects in a list may be or hold arrays over the store's memory.
    return copy.deepcopy(taken) if isinstance(taken, list) else taken


def _require_ray() -> Any:
    ray = interop.require("ray", "RemoteBatch needs Ray", "'fairlead-batching[ray]'")
    if not ray.is_initialized():
        raise RuntimeError("RemoteBatch needs a connection to Ray: call ray.init() or fairlead_placement.init_ray().")
    return ray
