# SPDX-License-Identifier: Apache-2.0
"""A dictionary of samples, and what is done to it sample by sample."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, overload

import numpy as np
import numpy.typing as npt

from . import _interop, _joining, _leaf, _transport
from ._checks import whole, whole_numbers
from ._plan import Cuts, Lengths

if TYPE_CHECKING:
    # A default, so that nobody has to annotate a batch; known to type checkers long before Python 3.13.
    from typing_extensions import TypeVar

    from ._batch import SlicedDataDict

    Content = TypeVar("Content", default=Any)
else:
    from typing import TypeVar

    Content = TypeVar("Content")


class Samples(UserDict[str, Any], Generic[Content]):
    """The part of `BatchedDataDict` that knows nothing of shards and microbatches, but forgets a plan in time."""

    data: dict[str, Any]
    micro_batch_indices: Cuts | None
    micro_batch_lengths: Lengths | None
    elem_counts_per_gb: list[int] | None
    shard_sizes: list[int] | None
    input_key: str | None
    padding: npt.NDArray[np.bool_] | None

    def __init__(self, data: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None, /, **kw: Any) -> None:
        super().__init__(data, **kw)
        self._forget_plan()
        self.padding = data.padding if isinstance(data, Samples) else None
        self._views = False

    def _forget_plan(self) -> None:
        self.micro_batch_indices = self.micro_batch_lengths = None
        self.elem_counts_per_gb = self.shard_sizes = self.input_key = None

    def __repr__(self) -> str:
        try:
            size = str(self.size)
        except (TypeError, ValueError):
            size = "inconsistent"
        return f"{type(self).__name__}({', '.join([f'size={size}', *self._described()])})"

    def _described(self) -> list[str]:
        return [f"{key}: {_leaf.describe(leaf)}" for key, leaf in self.data.items()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Not by way of a pickle, which refuses tensors on other devices.
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        left_out = ("data", "_views", "__orig_class__")
        attributes = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return _rebuilt, (type(self), _transport.packed(self.data, self._views), attributes)

    @property
    def size(self) -> int:
        """The number of samples; 0 without leaves.

        Raises:
            ValueError: leaves disagree, or one has no dims.
            TypeError: a leaf is no array, tensor or list.
        """
        sizes = {key: _leaf.rows(key, leaf) for key, leaf in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"Leaves have different numbers of samples: {sizes}.")
        return next(iter(sizes.values()), 0)

    @classmethod
    def from_batches(
        cls, batches: Iterable[Mapping[str, Any]], pad_value_dict: Mapping[str, Any] | None = None
    ) -> Self:
        """Return all samples of all batches, one batch after the other.

        Where arrays or tensors of two or more dims differ in dim 1, the shorter ones are padded on the right. A batch
        without samples may lack keys that others have. A masked array keeps its mask.

        Args:
            pad_value_dict: what to pad with, by key. The default is 0, which strings and times cannot hold.

        Raises:
            ValueError: there are no batches, batches with samples have different keys, or other dims differ; the dtypes
                of a key have no common one, or a whole number would become another one in it; ``pad_value_dict``
                has keys that no batch has, or a value that the leaf's dtype cannot hold.
            TypeError: a key has a list in one batch and a tensor in another.

        >>> joined = BatchedDataDict.from_batches([{"x": np.array([[1, 2]])}, {"x": np.array([[3]])}], {"x": -1})
        >>> joined["x"].tolist()
        [[1, 2], [3, -1]]
        """
        given = [batch if isinstance(batch, Samples) else cls(batch) for batch in batches]
        if not given:
            raise ValueError("There are no batches to join.")
        sizes = [batch.size for batch in given]
        new = cls()
        new.data = _joining.joined([batch.data for batch in given], sizes, pad_value_dict or {})
        new.padding = _joining.joined_padding([batch.padding for batch in given], sizes)
        return new

    def _made(self, make: Callable[[Any], Any]) -> SlicedDataDict[Content]:
        """A batch of what ``make`` gives for each leaf; the padding goes the same way."""
        from ._batch import SlicedDataDict

        new: SlicedDataDict[Content] = SlicedDataDict()
        new.data.update((key, make(leaf)) for key, leaf in self.data.items())
        new.padding = None if self.padding is None else make(self.padding)
        return new

    def slice(self, start: int, end: int) -> SlicedDataDict[Content]:
        """Samples from ``start`` up to ``end``, as views; ValueError unless 0 <= start <= end <= size."""
        size = self.size
        if not 0 <= start <= end <= size:
            raise ValueError(f"There is no slice from {start} to {end} of {size} samples.")
        return self._made(lambda leaf: leaf[start:end])

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[Content]:
        """Piece ``rank`` of ``chunks`` equal ones, as views; ValueError if there is no such piece.

        >>> BatchedDataDict(x=[1, 2, 3, 4]).chunk(1, chunks=2)["x"]
        [3, 4]
        """
        size = self.size
        rank, chunks = whole("rank", rank, at_least=0), whole("chunks", chunks, at_least=1)
        if size % chunks:
            raise ValueError(f"{size} samples are no multiple of chunks={chunks}: use pad_to_multiple({chunks}).")
        if rank >= chunks:
            raise ValueError(f"There is no chunk {rank} of {chunks}.")
        return self.slice(rank * size // chunks, (rank + 1) * size // chunks)

    def select_indices(self, indices: Iterable[int]) -> SlicedDataDict[Content]:
        """The samples at ``indices``, in that order, copied; ValueError if there is no such sample."""
        where = whole_numbers("indices", indices)
        size = self.size
        if where.size and (where.min() < 0 or where.max() >= size):
            wrong = where[(where < 0) | (where >= size)].tolist()
            raise ValueError(f"There are {size} samples, so none at {wrong[:10]}.")
        return self._made(lambda leaf: _leaf.take(leaf, where))

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[Content]:
        """Group ``batch_idx`` of a shard, or samples ``batch_idx * batch_size`` and following; as views.

        After dynamic batching or packing the plan says how large the group is, and ``batch_size`` is not looked at;
        the group keeps its part of the plan. Else the last batch may be smaller.

        Raises:
            ValueError: there is no such group or batch, or ``batch_size`` is missing.
        """
        size = self.size
        batch_idx = whole("batch_idx", batch_idx, at_least=0)
        cuts, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if cuts is None or lengths is None:
            if batch_size is None:
                raise ValueError("batch_size is needed: no plan says how large groups are.")
            batch_size = whole("batch_size", batch_size, at_least=1)
            start = batch_idx * batch_size
            if start >= size:
                raise ValueError(f"There is no batch {batch_idx} of {batch_size} among {size} samples.")
            return self.slice(start, min(start + batch_size, size))
        if batch_idx >= len(cuts):
            raise ValueError(f"There is no group {batch_idx}: the plan has {len(cuts)}.")
        counts = [group[-1][1] for group in cuts]
        start = sum(counts[:batch_idx])
        group = self.slice(start, start + counts[batch_idx])
        group.micro_batch_indices = [cuts[batch_idx]]
        group.micro_batch_lengths = [lengths[batch_idx]]
        group.input_key = self.input_key
        if len(cuts) == 1:
            group.shard_sizes = self.shard_sizes
        if self.elem_counts_per_gb is not None:
            group.elem_counts_per_gb = [counts[batch_idx]]
        return group

    @overload
    def repeat_interleave(self, num_repeats: int) -> Self: ...

    @overload
    def repeat_interleave(self, *, repeats: int) -> Self: ...

    def repeat_interleave(self, num_repeats: int | None = None, *, repeats: int | None = None) -> Self:
        """Return a new batch with each sample several times (1 or more) in a row; what lists hold is copied.

        The number has two names; TypeError unless exactly one of them is given.

        >>> BatchedDataDict(x=np.array([1, 2])).repeat_interleave(2)["x"].tolist()
        [1, 1, 2, 2]
        """
        if (num_repeats is None) == (repeats is None):
            raise TypeError("repeat_interleave() needs one number: num_repeats or repeats, which mean the same.")
        times = whole("num_repeats", repeats if num_repeats is None else num_repeats, at_least=1)
        self.size  # noqa: B018
        return self._like(self._made(lambda leaf: _leaf.repeat(leaf, times)))

    def _like(self, made: Samples[Content]) -> Self:
        new = type(self)(made.data)
        new.padding = made.padding
        return new

    def reorder_data(self, indices: Iterable[int]) -> Self:
        """Puts sample i at position ``indices[i]``, in place; returns itself.

        So it undoes a sort whose order was ``indices``. A plan of microbatches is forgotten.

        Raises:
            ValueError: ``indices`` is no permutation of all samples.

        >>> batch = BatchedDataDict(x=np.array([30, 10, 20]))
        >>> order = [1, 2, 0]
        >>> batch.select_indices(order).reorder_data(order)["x"].tolist()
        [30, 10, 20]
        """
        where = whole_numbers("indices", indices)
        size = self.size
        inverse = np.full(size, -1)
        if where.size == size and size and where.min() >= 0 and where.max() < size:
            inverse[where] = np.arange(size)
        if where.size != size or (inverse < 0).any():
            raise ValueError(
                f"indices must hold each of 0 to {size - 1} once, found {where.size}: {where[:10].tolist()}."
            )
        reordered = self._made(lambda leaf: _leaf.take(leaf, inverse))
        self.data, self.padding = reordered.data, reordered.padding
        self._forget_plan()
        return self

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Keeps at most ``truncated_len`` along ``dim`` of every array and tensor that has it, in place, as views.

        Raises:
            ValueError: ``dim`` is 0, which are the samples, or a number is negative.
        """
        whole("dim", dim, at_least=1)
        whole("truncated_len", truncated_len, at_least=0)
        self.data = {key: _leaf.truncate(leaf, dim, truncated_len) for key, leaf in self.data.items()}

    def get_dict(self) -> dict[str, Any]:
        """The leaves in a plain dict of its own; the leaves are not copied."""
        return dict(self.data)

    def to(self, device: Any) -> Self:
        """Moves torch tensors to ``device``, in place; returns itself. Arrays and lists stay where they are."""
        self.data = {key: leaf.to(device) if _interop.is_tensor(leaf) else leaf for key, leaf in self.data.items()}
        return self

    def to_device(self, device: Any) -> Self:
        """A batch like this one, plan included, with torch tensors on ``device``; this one is not touched."""
        new = copy.copy(self)
        new._views = False
        return new.to(device)

    def read_only(self) -> Self:
        """Promises that no reader writes to torch tensors; returns itself.

        Whoever unpickles the batch then gets tensors over the memory it was read from, without a copy. That memory
        is Ray's store, mapped read-only: **a write to such a tensor, in place or through `out=`, ends the process.**
        Without the promise readers get copies of their own. Numpy arrays are read-only views in both cases.

        Only what is pickled from this object is concerned: neither shards and slices made from it, nor the batch that
        a reader gets and sends on.
        """
        self._views = True
        return self

    def all_gather(self, group: Any = None) -> Self:
        """Return the samples of all ranks of a torch process group, in the order of ranks, on every rank.

        Ranks may have different numbers of samples; leaves that differ in dim 1 are padded as in `from_batches`.

        Raises:
            ValueError: ranks have different keys, or a key with different kinds, dims, dtypes or devices; or a rank
                cannot send its leaves, or cannot receive those of others. Every rank raises it, and it names the
                ranks that failed.
        """
        from ._gathering import gathered

        return type(self).from_batches(gathered(self, group))


def _rebuilt(cls: type[Any], data: dict[str, Any], attributes: dict[str, Any]) -> Any:
    batch: Any = object.__new__(cls)
    batch.__dict__.update(attributes, data=data, _views=False)
    return batch
