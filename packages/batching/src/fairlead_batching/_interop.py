# SPDX-License-Identifier: Apache-2.0
"""Operations on torch tensors. torch is imported only for a tensor that exists already or comes out of a pickle."""

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

# torch cannot gather these dtypes, so their bits are gathered. Autograd does not support them in any case.
_NOT_GATHERED = ("float4", "float8", "uint16", "uint32", "uint64")
# Integers of the same size carry the bits of dtypes that numpy lacks (bfloat16, float8_*, complex32).
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def is_tensor(value: Any) -> bool:
    """Return whether this is a torch tensor; False if torch is not imported."""
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
    return require_torch().from_numpy(array).to(like.device)


def take(tensor: Any, indices: Array) -> Any:
    """Return rows of a tensor, in one gather."""
    where = from_numpy(indices, like=tensor)
    if not dtype_name(tensor).startswith(_NOT_GATHERED):
        return tensor.index_select(0, where)
    return from_carrier(_bits(tensor).index_select(0, where), dtype_name(tensor))


def concatenate(tensors: Sequence[Any]) -> Any:
    return require_torch().cat(list(tensors))


def common_dtype(dtypes: Sequence[Any]) -> Any:
    """Return the dtype that concatenating tensors of these dtypes would give; RuntimeError if there is none."""
    return functools.reduce(require_torch().promote_types, dtypes)


def limits(dtype: Any) -> tuple[str, float, float] | None:
    """Return the kind of numbers, as `numpy.dtype.kind` has it, and their limits; None if torch does not know them."""
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
    """Return whether a dtype of floats has this infinity or NaN; several dtypes of 8 bits do not."""
    torch = require_torch()
    kept = torch.tensor(number, dtype=torch.float64).to(dtype).to(torch.float64).item()
    return bool(kept == number or (kept != kept and number != number))


def convert_integers(tensor: Any, dtype: Any) -> tuple[Array, Array] | None:
    """Return the whole numbers of a tensor, and their values in a dtype of floats; None for other dtypes."""
    torch = require_torch()
    floats = dtype.is_floating_point or dtype.is_complex
    if not floats or tensor.dtype == torch.bool or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return None
    # First to the dtype, and then to one that numpy has and that holds all its values.
    held = tensor.detach().to(dtype).to(torch.complex128 if dtype.is_complex else torch.float64)
    return to_numpy(tensor), to_numpy(held).real


def full(shape: Sequence[int], value: Any, dtype: Any, like: Any) -> Any:
    """Return a tensor of ``value``, on the device of ``like``."""
    return require_torch().full(tuple(shape), value, dtype=dtype, device=like.device)


def flat_bytes(tensor: Any) -> Any:
    """Return the bytes of a tensor in one dim, without a copy if they are dense. No backend supports every dtype."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # contiguous() and reshape() keep the stride of a dim of size 1, and view() refuses one that is not 1.
    return dense.as_strided((dense.numel(),), (1,)).view(require_torch().uint8)


def gathering_memory(flat: Any, itemsize: int, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, list[Any]]:
    """Return the tensors to send and to receive into, all of one size, because some backends require it."""
    most = itemsize * max(map(math.prod, shapes))
    sent = flat
    if flat.numel() < most:
        sent = flat.new_zeros(most)
        sent[: flat.numel()] = flat
    return sent, [flat.new_empty(most) for _ in shapes]


def all_gather(sent: Any, received: list[Any], group: Any) -> None:
    require_torch().distributed.all_gather(received, sent, group=group)


def from_bytes(data: Any, like: Any, shape: tuple[int, ...]) -> Any:
    """Return the tensor of the given shape and the dtype of ``like`` from the first bytes of ``data``."""
    return data[: math.prod(shape) * like.element_size()].view(like.dtype).reshape(shape)


def all_gather_objects(value: Any, group: Any) -> list[Any]:
    dist = require_torch().distributed
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def known_shape(tensor: Any) -> list[Any]:
    """Return the shape; of a nested tensor, whose parts differ, the number of parts and None."""
    return [tensor.size(0), *[None] * (tensor.ndim - 1)] if tensor.is_nested else list(tensor.shape)


def ragged_dim(tensor: Any) -> int:
    """Return the dim of a nested tensor whose size differs between parts; 1 for the strided layout."""
    if tensor.layout == require_torch().strided:
        return 1
    return next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))


def parts(tensor: Any, ragged: int) -> Sequence[Any]:
    """Return the parts of a nested tensor, the ragged dim first."""
    parts: Sequence[Any] = (tensor if ragged == 1 else tensor.transpose(1, ragged)).unbind()
    return parts


def nest(parts: list[Any], layout: str, ragged: int) -> Any:
    """Return the nested tensor of the given parts, whose first dim becomes the dim ``ragged``."""
    torch = require_torch()
    nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    return nested if ragged == 1 else nested.transpose(1, ragged)


def is_plain(tensor: Any) -> bool:
    """Return whether memory, strides and a dtype describe the tensor completely."""
    torch = require_torch()
    classes = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in classes and tensor.layout == torch.strided and not tensor.is_quantized


def memory(tensor: Any) -> Array:
    """Return the values or bits of a CPU tensor, as a view of its memory if that is dense, else as a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    if not has_numpy_dtype(tensor):
        dense = _bits(dense)
    array: Array = dense.numpy()
    return array if array.flags.forc else dense.contiguous().numpy()


def tensor_over(array: Array, dtype: str) -> Any:
    """Return the tensor over the memory of a writable array."""
    return from_carrier(require_torch().from_numpy(array), dtype)
