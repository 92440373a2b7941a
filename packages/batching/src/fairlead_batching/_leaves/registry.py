# SPDX-License-Identifier: Apache-2.0
"""Leaf types of other packages: the protocol, and the registration."""

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from . import interop

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
    """Make instances of a class, and of its subclasses, leaves of a batch. It can be used as a decorator.

    The class has to be imported, or pickled by value, in every process that uses such a batch.

    Args:
        kind: a class with the methods of `Leaf`.

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
