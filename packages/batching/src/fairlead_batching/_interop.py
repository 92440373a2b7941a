# SPDX-License-Identifier: Apache-2.0
"""torch tensors. torch is imported only where a tensor shows that it is there already, or comes out of a pickle."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# What torch cannot gather: of these the bits are gathered, which autograd does not follow; nor do they need it.
_NOT_GATHERED = ("float4", "float8", "uint16", "uint32", "uint64")
# Stand-ins of the same size for dtypes that numpy lacks (bfloat16, float8_*, complex32): only bits are moved.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def is_tensor(value: Any) -> bool:
    """Whether this is a torch tensor; without torch nothing is."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def require_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            f"torch tensors need torch, which cannot be imported here ({error}): pip install torch", name="torch"
        ) from error


def to_numpy(tensor: Any) -> Array:
    """The values of a tensor of a dtype that numpy has, from whatever device."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def rows(tensor: Any) -> int:
    """Return the size of dim 0; a nested tensor may have no other."""
    return int(tensor.size(0))


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def has_numpy_dtype(tensor: Any) -> bool:
    return hasattr(np, dtype_name(tensor))


def carried(tensor: Any) -> Any:
    """The tensor, or its bits as integers if numpy lacks its dtype."""
    return tensor if has_numpy_dtype(tensor) else _bits(tensor)


def nonzero(tensor: Any) -> Array:
    """Where a tensor of any dtype, on whatever device, is not 0; an array of its shape."""
    array: Array = tensor.detach().bool().cpu().numpy()
    return array


def _bits(tensor: Any) -> Any:
    return tensor.view(getattr(require_torch(), _CARRIERS[tensor.element_size()]))


def uncarried(tensor: Any, dtype: str) -> Any:
    return tensor if dtype_name(tensor) == dtype else tensor.view(getattr(require_torch(), dtype))


def take(tensor: Any, indices: Array) -> Any:
    """Rows of a tensor, in one gather."""
    where = require_torch().from_numpy(indices).to(tensor.device)
    if not dtype_name(tensor).startswith(_NOT_GATHERED):
        return tensor.index_select(0, where)
    return uncarried(_bits(tensor).index_select(0, where), dtype_name(tensor))


def concatenate(tensors: Sequence[Any]) -> Any:
    return require_torch().cat(list(tensors))


def common_dtype(dtypes: Sequence[Any]) -> Any:
    """Return the dtype that concatenating tensors of these dtypes would give; RuntimeError if there is none."""
    return functools.reduce(require_torch().promote_types, dtypes)


def limits(dtype: Any) -> tuple[str, float, float] | None:
    """Return the kind of numbers, as `numpy.dtype.kind` has it, and their limits; None if torch cannot tell."""
    torch = require_torch()
    if dtype == torch.bool:
        return "b", 0, 1
    try:
        if dtype.is_floating_point or dtype.is_complex:
            info = torch.finfo(dtype)
            return "c" if dtype.is_complex else "f", info.min, info.max
        return "i", torch.iinfo(dtype).min, torch.iinfo(dtype).max
    except TypeError:
        return None


def keeps(number: float, dtype: Any) -> bool:
    """Return whether a dtype of floats has this infinity or NaN; several of 8 bits have not."""
    torch = require_torch()
    kept = torch.tensor(number, dtype=torch.float64).to(dtype).to(torch.float64).item()
    return bool(kept == number or (kept != kept and number != number))


def integers(tensor: Any, dtype: Any) -> tuple[Array, Array] | None:
    """Return the whole numbers of a tensor, and what they become in another dtype; None if either has no such."""
    torch = require_torch()
    floats = dtype.is_floating_point or dtype.is_complex
    if not floats or tensor.dtype == torch.bool or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return None
    # Through the dtype, and then to one that numpy has and that holds every value of it.
    held = tensor.detach().to(dtype).to(torch.complex128 if dtype.is_complex else torch.float64)
    return to_numpy(tensor), to_numpy(held).real


def full(shape: Sequence[int], value: Any, dtype: Any, like: Any) -> Any:
    """A tensor of ``value``, on the device of ``like``."""
    return require_torch().full(tuple(shape), value, dtype=dtype, device=like.device)


def ones(size: int, like: Any) -> Any:
    torch = require_torch()
    return torch.ones(size, dtype=torch.float32, device=like.device)


def flat_bytes(tensor: Any) -> Any:
    """Return the bytes of a tensor in one dim, without a copy where they are dense: no backend knows every dtype."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Neither contiguous() nor reshape() changes the stride of a dim of size 1, and view() refuses one that is not 1.
    return dense.as_strided((dense.numel(),), (1,)).view(require_torch().uint8)


def gathering_memory(flat: Any, itemsize: int, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, list[Any]]:
    """Return what a rank sends and where it receives, all of one size: not every backend takes different ones."""
    most = itemsize * max(map(math.prod, shapes))
    sent = flat
    if flat.numel() < most:
        sent = flat.new_zeros(most)
        sent[: flat.numel()] = flat
    return sent, [flat.new_empty(most) for _ in shapes]


def all_gather(sent: Any, received: list[Any], group: Any) -> None:
    require_torch().distributed.all_gather(received, sent, group=group)


def from_bytes(data: Any, like: Any, shape: tuple[int, ...]) -> Any:
    """Return the tensor of a shape, and of the dtype of ``like``, whose bytes ``data`` begins with."""
    return data[: math.prod(shape) * like.element_size()].view(like.dtype).reshape(shape)


def all_gather_objects(value: Any, group: Any) -> list[Any]:
    dist = require_torch().distributed
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def known_shape(tensor: Any) -> list[Any]:
    """Return the shape; of a nested tensor, whose parts differ, the number of parts and None."""
    return [rows(tensor), *[None] * (tensor.ndim - 1)] if is_nested(tensor) else list(tensor.shape)


def is_nested(tensor: Any) -> bool:
    return bool(tensor.is_nested)


def ragged_dim(tensor: Any) -> int:
    """Return which dim of a nested tensor has a size of its own in each part; 1 for the strided layout."""
    if tensor.layout == require_torch().strided:
        return 1
    return next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))


def parts(tensor: Any, ragged: int) -> Sequence[Any]:
    """Return the parts of a nested tensor, the ragged dim first."""
    parts: Sequence[Any] = (tensor if ragged == 1 else tensor.transpose(1, ragged)).unbind()
    return parts


def nest(parts: list[Any], layout: str, ragged: int) -> Any:
    """Return the nested tensor whose parts, ``ragged`` being the first of their dims, are given."""
    torch = require_torch()
    nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    return nested if ragged == 1 else nested.transpose(1, ragged)


def is_plain(tensor: Any) -> bool:
    """Whether the tensor is memory, strides and a dtype, and nothing more."""
    torch = require_torch()
    classes = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in classes and tensor.layout == torch.strided and not tensor.is_quantized


def memory(tensor: Any) -> Array:
    """The values, or bits, of a CPU tensor: over its own memory if that is dense, else copied once."""
    dense = carried(tensor.detach().resolve_conj().resolve_neg())
    array: Array = dense.numpy()
    return array if array.flags.forc else dense.contiguous().numpy()


def over(array: Array, dtype: str) -> Any:
    """The tensor over the memory of a writable array."""
    return uncarried(require_torch().from_numpy(array), dtype)
