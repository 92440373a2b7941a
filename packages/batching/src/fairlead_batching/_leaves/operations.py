# SPDX-License-Identifier: Apache-2.0
"""One leaf of a batch: a numpy array, a torch tensor or a list, whose first dim is the sample, or a registered type.

Other packages register their types of leaves here.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from . import interop

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Kind = TypeVar("Kind", bound=type[Any])


@runtime_checkable
class Leaf(Protocol):
    """The methods of a registered type of leaves. `register_leaf` registers one.

    A type may also have

    - ``pad(count)``: return the leaf with ``count`` dummy samples after its own, for
      `BatchedDataDict.pad_to_multiple`; by default the last sample is repeated;
    - ``nbytes``: its size in bytes, for descriptions.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, indices: npt.NDArray[np.int64], /) -> Self:
        """Return the samples at ``indices``, in that order; an index may occur several times."""

    @classmethod
    def concat(cls, leaves: Sequence[Self], /) -> Self:
        """Return all samples of all leaves, one leaf after the other; there is at least one leaf."""

    def to(self, device: Any, /) -> Self:
        """Return the leaf on a torch device, or itself if it does not hold tensors."""


def register_leaf(kind: Kind) -> Kind:
    """Make instances of a class with the methods of `Leaf`, and of its subclasses, leaves. It can be a decorator.

    The class has to be imported, or pickled by value, in every process that uses such a batch.

    Returns:
        The class itself.

    Raises:
        TypeError: it is not a class, lacks a method of `Leaf`, or is a list, an array or a tensor, so a leaf already.

    >>> register_leaf(int)
    Traceback (most recent call last):
    TypeError: int lacks __len__(), take(), concat(), to() of Leaf: a class of leaves needs all of them.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_leaf() needs a class, found {kind!r}.")
    if issubclass(kind, (list, np.ndarray)) or interop.is_tensor_type(kind):
        raise TypeError(f"{kind.__name__} is a list, an array or a tensor, so its instances are leaves already.")
    methods = ("__len__", "take", "concat", "to")
    if missing := [f"{name}()" for name in methods if not callable(getattr(kind, name, None))]:
        raise TypeError(f"{kind.__name__} lacks {', '.join(missing)} of Leaf: a class of leaves needs all of them.")
    # The class carries the mark itself, so that a class that is pickled by value is registered at the reader.
    kind.__fairlead_leaf__ = True
    return kind


def is_registered(value: Any) -> bool:
    """Return whether this is an instance of a registered class."""
    return getattr(type(value), "__fairlead_leaf__", False) is True


def kind(key: str, leaf: Any) -> str:
    """Return ``"list"``, ``"numpy"``, ``"torch"``, or the name of a registered type; TypeError for any other leaf."""
    if is_registered(leaf):
        return type(leaf).__qualname__
    if isinstance(leaf, list):
        return "list"
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if interop.is_tensor(leaf):
        return "torch"
    raise TypeError(
        f"Leaf {key!r} must be a list, a numpy array or a torch tensor, found {type(leaf).__name__}. A value that is "
        f"not per sample belongs into batch.meta; register_leaf() registers other types of leaves."
    )


def count_samples(leaves: Mapping[str, Any]) -> int:
    """Return the number of samples that all leaves have; 0 without leaves."""
    sizes = {key: _rows(key, leaf) for key, leaf in leaves.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"Leaves have different numbers of samples: {sizes}. "
            f"A value that is not per sample belongs into batch.meta."
        )
    return next(iter(sizes.values()), 0)


def _rows(key: str, leaf: Any) -> int:
    if kind(key, leaf) == "list" or is_registered(leaf):
        return len(leaf)
    if not leaf.ndim:
        raise ValueError(f"Leaf {key!r} has no dims, so no samples; its first dim must be the sample.")
    return len(leaf) if isinstance(leaf, np.ndarray) else int(leaf.size(0))  # a nested tensor has no len


def take(leaf: Any, indices: IntArray) -> Any:
    """Copy the samples at ``indices`` in one gather."""
    if isinstance(leaf, list):
        return list(map(leaf.__getitem__, indices.tolist()))
    if isinstance(leaf, np.ndarray):
        return leaf.take(indices, axis=0)
    if is_registered(leaf):
        taken = leaf.take(indices)
        if len(taken) != len(indices):
            raise ValueError(
                f"{type(leaf).__qualname__}.take() returned {len(taken)} samples for {len(indices)} indices."
            )
        return taken
    return interop.take(leaf, indices)


def cut(leaf: Any, start: int, end: int) -> Any:
    """Return the samples from ``start`` up to ``end``, as a view if the leaf is an array or a tensor."""
    return take(leaf, np.arange(start, end)) if is_registered(leaf) else leaf[start:end]


def move(leaf: Any, device: Any) -> Any:
    """Return a tensor or a registered leaf on the device, any other leaf unchanged."""
    return leaf.to(device) if interop.is_tensor(leaf) or is_registered(leaf) else leaf


def pad(leaf: Any, count: int) -> Any:
    """Return a leaf with ``count`` dummy samples after its own: copies of the last one, which are valid input."""
    if is_registered(leaf) and hasattr(leaf, "pad"):
        return leaf.pad(count)
    size = leaf.size(0) if interop.is_tensor(leaf) else len(leaf)
    if isinstance(leaf, list):
        return [*leaf, *repeat(leaf, np.full(count, size - 1))]
    return take(leaf, np.minimum(np.arange(size + count), size - 1))


def repeat(leaf: Any, indices: IntArray) -> Any:
    """Copy the samples at ``indices``, and the objects in lists, so that a change of one sample changes no other."""
    taken = take(leaf, indices)
    return list(map(copy.deepcopy, taken)) if isinstance(leaf, list) else taken


def truncate(leaf: Any, dim: int, length: int) -> Any:
    """Return a view of at most ``length`` along ``dim``; a list, or a leaf without that dim, is returned unchanged."""
    if is_registered(leaf) or isinstance(leaf, list) or leaf.ndim <= dim:
        return leaf
    return leaf[(slice(None),) * dim + (slice(length),)]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two leaves or other values are of one kind and equal, bit for bit in arrays except for NaN."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    if interop.is_tensor(one):
        return interop.is_same(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def to_integers(name: str, values: Iterable[int] | Any) -> IntArray:
    """Return a list, array or tensor of whole numbers as an int64 array of one dim."""
    if interop.is_tensor(values):
        if not interop.has_numpy_dtype(values):
            raise ValueError(f"{name!r} must be whole numbers, found {interop.dtype_name(values)}.")
        values = interop.to_numpy(values)
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if array.ndim != 1:
        raise ValueError(f"{name!r} must have one dim, found shape {array.shape}.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name!r} must be whole numbers, found {array.dtype}.")
    if array.dtype == np.uint64 and (largest := array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name!r} must fit into int64, found {largest}.")
    return array.astype(np.int64, copy=False)


def describe(leaf: Any) -> str:
    """Return a short description of a leaf of any kind."""
    if isinstance(leaf, list):
        return f"list[{len(leaf)}]"
    if isinstance(leaf, np.ndarray):
        return f"numpy {leaf.dtype}{list(leaf.shape)}"
    if interop.is_tensor(leaf):
        # The parts of a nested tensor differ.
        shape = [leaf.size(0), *[None] * (leaf.ndim - 1)] if leaf.is_nested else list(leaf.shape)
        return f"torch {interop.dtype_name(leaf)}{shape}"
    if is_registered(leaf):
        size = f", {leaf.nbytes:,} bytes" if hasattr(leaf, "nbytes") else ""
        return f"{type(leaf).__qualname__}[{len(leaf)}{size}]"
    return type(leaf).__name__
