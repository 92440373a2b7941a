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


def common_dtype(tensors: Sequence[Any]) -> Any:
    """The dtype that concatenating the tensors would give."""
    return functools.reduce(require_torch().promote_types, (tensor.dtype for tensor in tensors))


def bounds(dtype: Any) -> tuple[int, int] | None:
    torch = require_torch()
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def full(shape: Sequence[int], value: Any, dtype: Any, like: Any) -> Any:
    """A tensor of ``value``, on the device of ``like``."""
    return require_torch().full(tuple(shape), value, dtype=dtype, device=like.device)


def ones(size: int, like: Any) -> Any:
    torch = require_torch()
    return torch.ones(size, dtype=torch.float32, device=like.device)


def all_gather(tensor: Any, shapes: Sequence[tuple[int, ...]], group: Any) -> list[Any]:
    """The tensors of all ranks of a process group, given their shapes."""
    torch = require_torch()
    # Bytes, since no backend knows every dtype; padded to the largest, since not every one takes different sizes.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    sizes = [math.prod(shape) * tensor.element_size() for shape in shapes]
    sent = flat.new_zeros(max(sizes))
    sent[: flat.numel()] = flat
    received = [torch.empty_like(sent) for _ in sizes]
    torch.distributed.all_gather(received, sent, group=group)
    return [
        data[:size].view(tensor.dtype).reshape(shape) for data, size, shape in zip(received, sizes, shapes, strict=True)
    ]


def all_gather_objects(value: Any, group: Any) -> list[Any]:
    dist = require_torch().distributed
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def is_nested(tensor: Any) -> bool:
    return bool(tensor.is_nested)


def nest(parts: list[Any], layout: str) -> Any:
    torch = require_torch()
    return torch.nested.nested_tensor(parts, layout=getattr(torch, layout))


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
