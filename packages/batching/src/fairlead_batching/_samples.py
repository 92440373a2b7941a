# SPDX-License-Identifier: Apache-2.0
"""A dictionary of samples: its size and form, joining, order, devices and pickling."""

import copy
import copyreg
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self

import numpy as np

from ._args import as_int
from ._leaves import interop, joining, operations, transport
from ._leaves.interop import BoolArray
from ._plan import Cuts, Lengths, PartPlan

if TYPE_CHECKING:
    # TypeVars have a default only from Python 3.13 on. The default spares users the annotation of every batch.
    from typing_extensions import TypeVar

    Content = TypeVar("Content", default=Any)
else:
    from typing import TypeVar

    Content = TypeVar("Content")
Batch = TypeVar("Batch", bound="Samples[Any]")


def find_keys(known: Sequence[str], keys: str | Iterable[str]) -> list[str]:
    """Return the keys of leaves that are named, one by one or by the part before a dot; ValueError if there is none."""
    collected: dict[str, None] = {}
    for key in [keys] if isinstance(keys, str) else keys:
        named = [other for other in known if _is_named(other, key)]
        if not named:
            raise ValueError(f"Unknown key {key!r}; the batch has {sorted(known)}.")
        collected.update(dict.fromkeys(named))
    return list(collected)


def _is_named(name: str, key: str) -> bool:
    """Return whether a leaf is the one under ``key``, or one of a mapping that was stored under it."""
    return name == key or name.startswith(f"{key}.")


def _flatten(key: str, item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an item with their keys, dotted if it is a mapping; ValueError for an empty mapping."""
    if not isinstance(item, Mapping):
        yield key, item
    elif not item:
        raise ValueError(f"Leaf {key!r} is an empty mapping, which has no leaves: leave it out.")
    else:
        for name, leaf in item.items():
            yield from _flatten(f"{key}.{name}", leaf)


class Samples(UserDict[str, Any], Generic[Content]):
    """The base of `BatchedDataDict`: operations on all samples that return a batch of the same class, or change it."""

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None, /, **kw: Any) -> None:
        super().__init__(data, **kw)
        self.plan: PartPlan = PartPlan()
        self.padding: BoolArray | None = data.padding if isinstance(data, Samples) else None
        self.meta: dict[str, Any] = dict(data.meta) if isinstance(data, Samples) else {}
        self._views = False

    def __setitem__(self, key: str, item: Any) -> None:
        leaves = dict(_flatten(key, item))
        if key not in leaves:  # a mapping, which replaces everything of that name
            self.data = {name: leaf for name, leaf in self.data.items() if not _is_named(name, key)}
        self.data.update(leaves)

    def copy(self) -> Self:
        """Return a new batch with the same leaves, which are not copied, with the plan."""
        # That of UserDict empties this batch while it copies, which another thread would see.
        return copy.copy(self)

    def __or__(self, other: object) -> NoReturn:
        # That of UserDict loses the plan, the padding and ``meta``.
        raise TypeError(f"A {type(self).__name__} has no operator |: use union(), or update() to replace leaves.")

    def __ror__(self, other: object) -> NoReturn:
        self.__or__(other)

    def __ior__(self, other: object) -> NoReturn:
        self.__or__(other)

    def __copy__(self) -> Self:
        new = super().__copy__()
        new.meta = dict(self.meta)
        return new

    def _derive(self, transform: Callable[[Any], Any], kind: type[Batch]) -> Batch:
        """Return a batch of the given class, with all leaves and the padding transformed alike."""
        new = kind({key: transform(leaf) for key, leaf in self.data.items()})
        new.padding = None if self.padding is None else transform(self.padding)
        new.meta = dict(self.meta)
        return new

    @property
    def micro_batch_indices(self) -> Cuts | None:
        """Per group, the microbatches as ``[start, end]`` within that group's part of the shard; or None."""
        return self.plan.micro_batch_indices

    @property
    def micro_batch_lengths(self) -> Lengths | None:
        """Per group, the padded length of each microbatch, or the tokens of each bin; or None."""
        return self.plan.micro_batch_lengths

    @property
    def elem_counts_per_gb(self) -> list[int] | None:
        """Per group, its samples; None unless the shard was planned by packing."""
        return self.plan.elem_counts_per_gb

    def __repr__(self) -> str:
        try:
            size = str(self.size)
        except (TypeError, ValueError):
            size = "inconsistent"
        leaves = [f"{key}: {operations.describe(leaf)}" for key, leaf in self.data.items()]
        return f"{type(self).__name__}({', '.join([f'size={size}', *leaves])})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The default is a pickle, which refuses tensors on other devices.
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        packed = {name: transport.pack(self.__dict__[name], self._views) for name in ("data", "meta")}
        state = {**self.__dict__, **packed, "_views": False}
        state.pop("__orig_class__", None)
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        """The number of samples; 0 without leaves.

        Raises:
            ValueError: leaves disagree, or one has no dims.
            TypeError: a leaf is not an array, a tensor or a list.
        """
        return operations.count_samples(self.data)

    @classmethod
    def from_batches(
        cls,
        batches: Iterable[Mapping[str, Any]],
        pad_value_dict: Mapping[str, Any] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """Return all samples of all batches, one batch after the other; of no batches, an empty batch.

        Where arrays or tensors of two or more dims differ in dim 1, the shorter ones are padded on the right. A batch
        without samples may lack keys that others have. ``meta`` is that of all batches.

        Args:
            batches: the batches, or mappings of leaves.
            pad_value_dict: the values to pad with, by key. The default is 0, which strings and times cannot hold.
            allow_missing_packed_tensors: accepted for programs written for NeMo RL, and ignored: there is no
                ``PackedTensor``.

        Raises:
            ValueError: batches with samples have different keys, or dtypes or other dims differ. Or ``pad_value_dict``
                has keys that no batch has, or a value that the leaf's dtype cannot hold. Or two batches have different
                values of a key in ``meta``.
            TypeError: a key has a list in one batch and a tensor in another.

        >>> joined = BatchedDataDict.from_batches([{"x": np.array([[1, 2]])}, {"x": np.array([[3]])}], {"x": -1})
        >>> joined["x"].tolist()
        [[1, 2], [3, -1]]
        """
        given = [batch if isinstance(batch, Samples) else cls(batch) for batch in batches]
        if not given:
            return cls()
        sizes = [batch.size for batch in given]
        joined = cls(joining.join([batch.data for batch in given], sizes, pad_value_dict or {}))
        joined.padding = joining.join_padding([batch.padding for batch in given], sizes)
        joined.meta = joining.join_meta([batch.meta for batch in given])
        return joined

    def _replace(self, leaves: dict[str, Any]) -> Self:
        """Return a copy of the batch with other leaves of the same samples, so with the same plan and padding."""
        new = copy.copy(self)
        new.__dict__.update(data=leaves, _views=False)
        return new

    def select(self, keys: str | Iterable[str]) -> Self:
        """Return a batch of the named leaves, not copied, with the plan; ValueError if there is no such leaf.

        >>> list(BatchedDataDict(x=[1], y=[2], z=[3]).select(["x", "z"]))
        ['x', 'z']
        """
        return self._replace({key: self.data[key] for key in find_keys(list(self.data), keys)})

    def drop(self, keys: str | Iterable[str]) -> Self:
        """Return a batch of the other leaves, not copied, with the plan; ValueError if there is no such leaf."""
        dropped = set(find_keys(list(self.data), keys))
        return self._replace({key: leaf for key, leaf in self.data.items() if key not in dropped})

    def rename(self, names: Mapping[str, str]) -> Self:
        """Return a batch whose leaves have new names, given by the old ones. Their order stays; the plan follows them.

        Raises:
            ValueError: there is no such leaf, or two leaves would have the same name.

        >>> BatchedDataDict(x=[1], y=[2]).rename({"x": "tokens"})
        BatchedDataDict(size=1, tokens: list[1], y: list[1])
        """
        if unknown := [key for key in names if key not in self]:
            raise ValueError(f"Unknown keys {unknown}; the batch has {sorted(self)}.")
        renamed = [names.get(key, key) for key in self]
        if twice := sorted({key for key in renamed if renamed.count(key) > 1}):
            raise ValueError(f"Two leaves would have the same name, {twice}: drop or rename the other one as well.")
        new = self._replace(dict(zip(renamed, self.data.values(), strict=True)))
        new.plan = self.plan.rename(names)
        return new

    def union(self, other: Mapping[str, Any]) -> Self:
        """Return a batch with the leaves of both, which are not copied. The plan is that of this batch.

        Both have the same samples in the same order; the other may be a mapping of leaves.

        Raises:
            ValueError: the numbers of samples or the records of padding differ, or both have a key with different
                leaves or, in ``meta``, different values.

        >>> BatchedDataDict(x=[1]).union({"y": [2]})
        BatchedDataDict(size=1, x: list[1], y: list[1])
        """
        added = other if isinstance(other, Samples) else type(self)(other)
        if self.data and added.data and self.size != added.size:
            raise ValueError(f"Batches of {self.size} and {added.size} samples have no union: their samples differ.")
        shared = self.data.keys() & added.data.keys()
        if conflicts := sorted(key for key in shared if not interop.is_same(self.data[key], added.data[key])):
            raise ValueError(f"Both batches have {conflicts}, with different leaves: drop or rename them in one batch.")
        if self.padding is not None and added.padding is not None and not np.array_equal(self.padding, added.padding):
            row = int(np.flatnonzero(self.padding != added.padding)[0])
            raise ValueError(f"Row {row} is a dummy row in one of the batches only: drop_padding() in both first.")
        new = self._replace({**self.data, **added.data})
        new.padding = added.padding if self.padding is None else self.padding
        new.meta = joining.join_meta([self.meta, added.meta])
        return new

    def repeat_interleave(
        self, num_repeats: int | None = None, *, share_immutable_media: bool = False, repeats: int | None = None
    ) -> Self:
        """Return a new batch with each sample ``num_repeats`` times in a row. Objects in lists are copied.

        Args:
            num_repeats: how often each sample occurs.
            share_immutable_media: accepted for programs written for NeMo RL, and ignored: the rows of a `RaggedLeaf`
                are always shared, and objects in lists never are.
            repeats: another name of ``num_repeats``.

        Raises:
            TypeError: neither or both of the names were given, or the number is not whole.
            ValueError: the number is less than 1.

        >>> BatchedDataDict(x=np.array([1, 2])).repeat_interleave(2)["x"].tolist()
        [1, 1, 2, 2]
        """
        if (num_repeats is None) == (repeats is None):
            raise TypeError(f"Pass num_repeats or repeats, not both; got {num_repeats} and {repeats}.")
        count = as_int("num_repeats", repeats if num_repeats is None else num_repeats, at_least=1)
        indices = np.repeat(np.arange(self.size), count)
        repeated = self._derive(lambda leaf: operations.repeat(leaf, indices), type(self))
        repeated.plan = self.plan.resize(lambda of_shard: of_shard * count)
        return repeated

    def shuffle(self, seed: int) -> Self:
        """Return copies of all samples in a random order that depends on ``seed`` only. A plan is dropped.

        >>> BatchedDataDict(x=[1, 2, 3, 4]).shuffle(seed=0)["x"]
        [3, 1, 2, 4]
        """
        order = np.random.default_rng(as_int("seed", seed, at_least=0)).permutation(self.size)
        shuffled = self._derive(lambda leaf: operations.take(leaf, order), type(self))
        shuffled.plan = self.plan.resize(int)
        return shuffled

    def reorder_data(self, reorded_indices: Iterable[int]) -> Self:
        """Put sample i at position ``reorded_indices[i]``, in place, and return the batch itself.

        This undoes a sort whose order was ``reorded_indices``. A plan of microbatches is dropped.

        Raises:
            ValueError: ``reorded_indices`` is not a permutation of all samples.

        >>> batch = BatchedDataDict(x=np.array([30, 10, 20]))
        >>> order = [1, 2, 0]
        >>> batch.select_indices(order).reorder_data(order)["x"].tolist()
        [30, 10, 20]
        """
        where = operations.to_integers("reorded_indices", reorded_indices)
        if not np.array_equal(np.sort(where), np.arange(size := self.size)):
            raise ValueError(
                f"reorded_indices must hold each of 0 to {size - 1} once, found {where.size}: {where[:10].tolist()}."
            )
        moved = self._derive(lambda leaf: operations.take(leaf, where.argsort()), Samples)
        self.data, self.padding = moved.data, moved.padding
        self.plan = self.plan.resize(int)
        return self

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Keep at most ``truncated_len`` along ``dim`` of every array and tensor that has it, in place, as views.

        Raises:
            ValueError: ``dim`` is 0, which is the dim of the samples, or a number is negative.
        """
        as_int("dim", dim, at_least=1)
        as_int("truncated_len", truncated_len, at_least=0)
        self.data = {key: operations.truncate(leaf, dim, truncated_len) for key, leaf in self.data.items()}

    def get_dict(self) -> dict[str, Any]:
        """Return a new plain dict of the leaves, which are not copied."""
        return dict(self.data)

    def to(self, device: Any) -> Self:
        """Move torch tensors to ``device``, in place, and return the batch itself. Arrays and lists are not moved."""
        self.data = {key: operations.move(leaf, device) for key, leaf in self.data.items()}
        return self

    def to_device(self, device: Any) -> Self:
        """Return a copy of the batch, including its plan, with torch tensors on ``device``."""
        return self._replace(self.data).to(device)

    def _read_only(self) -> Self:
        """Promise that no reader of this object writes to torch tensors, and return the batch itself.

        A process that unpickles the batch then gets tensors over the memory it was read from, which is Ray's store,
        mapped read-only: a write to such a tensor ends the process. Without the promise readers get their own copies.
        """
        self._views = True
        return self
