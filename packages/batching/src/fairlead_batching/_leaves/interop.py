# SPDX-License-Identifier: Apache-2.0
"""Operations on torch tensors, and comparisons of arrays and tensors.

torch is imported only for a tensor that exists already or comes out of a pickle.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# torch cannot gather these dtypes, so their bits are gathered. Autograd does not support them in any case.
_NOT_GATHERED = ("float4", "float8", "uint16", "uint32", "uint64")
# Integers of the same size carry the bits of dtypes that numpy lacks (bfloat16, float8_*).
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def is_tensor(value: Any) -> bool:
    """Return whether this is a torch tensor; False if torch is not imported."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def require(library: str, need: str, install: str) -> Any:
    """Return a library that is imported only where it is needed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        message = f"{need}, which cannot be imported here ({error}): pip install {install}"
        raise ImportError(message, name=library) from error


def require_torch() -> Any:
    return require("torch", "torch tensors need torch", "torch")


def to_numpy(tensor: Any) -> Array:
    """Return the values of a tensor of a dtype that numpy has, from any device."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def has_numpy_dtype(tensor: Any) -> bool:
    return hasattr(np, dtype_name(tensor))


def _bits(tensor: Any) -> Any:
    return tensor.view(getattr(require_torch(), _CARRIERS[tensor.element_size()]))


def from_carrier(tensor: Any, dtype: str) -> Any:
    return tensor if dtype_name(tensor) == dtype else tensor.view(getattr(require_torch(), dtype))


def from_numpy(array: Array, like: Any) -> Any:
    """Return the tensor of an array, on the device of ``like``."""
    # torch refuses negative strides, such as those of the indices of a descending sort.
    return require_torch().from_numpy(np.ascontiguousarray(array)).to(like.device)


def take(tensor: Any, indices: Array) -> Any:
    """Return rows of a tensor, in one gather."""
    where = from_numpy(indices, like=tensor)
    if not dtype_name(tensor).startswith(_NOT_GATHERED):
        return tensor.index_select(0, where)
    return from_carrier(_bits(tensor).index_select(0, where), dtype_name(tensor))


def check_kind(key: str, leaf: Any) -> None:
    """Refuse arrays and tensors that cannot be leaves."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"Leaf {key!r} is a masked array: make a leaf of its data, and a leaf of its mask.")
    if is_tensor(leaf) and leaf.is_nested:
        raise TypeError(f"Leaf {key!r} is a nested tensor: pad it, or make a RaggedLeaf of its parts.")
    if is_tensor(leaf) and dtype_name(leaf) == "complex32":
        raise TypeError(f"Leaf {key!r} is a tensor of complex32: convert it to complex64.")


def is_same(first: Any, other: Any) -> bool:
    """Return whether two leaves or other values are of one kind and equal, bit for bit in arrays except for NaN."""
    if first is other:
        return True
    if type(first) is not type(other):
        return False
    if isinstance(first, np.ndarray):
        if first.dtype != other.dtype or first.shape != other.shape:
            return False
        return bool(np.array_equal(first, other, equal_nan=first.dtype.kind in "fc"))
    if is_tensor(first):
        if (first.dtype, first.device, first.shape) != (other.dtype, other.device, other.shape):
            return False
        return bool(((first == other) | ((first != first) & (other != other))).all())
    if isinstance(first, (list, tuple)):
        return len(first) == len(other) and all(map(is_same, first, other))
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(is_same(value, other[key]) for key, value in first.items())
    return bool(first == other)


def full(shape: Sequence[int], value: Any, dtype: Any, like: Any) -> Any:
    """Return an array or tensor of ``value``, of the kind and on the device of ``like``."""
    if isinstance(like, np.ndarray):
        array = np.empty(shape, dtype=dtype)
        array.fill(value)  # np.full would spread a sequence over an array of objects
        return array
    return require_torch().full(tuple(shape), value, dtype=dtype, device=like.device)


def memory(tensor: Any) -> Array:
    """Return the values or bits of a CPU tensor, as a view of its memory if that is dense, else as a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    if not has_numpy_dtype(tensor):
        dense = _bits(dense)
    array: Array = dense.numpy()
    return array if array.flags.forc else dense.contiguous().numpy()
