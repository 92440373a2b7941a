# SPDX-License-Identifier: Apache-2.0
"""Pickling of a batch: its memory is transferred out of band (PEP 574), so that storing it copies it once.

A torch CPU tensor is sent as a numpy array over its memory and the name of its dtype. Memory read from Ray's store is
read-only, which torch cannot express: a write to a tensor over it ends the process. So a reader gets a private copy
of each tensor, unless the sender has promised not to write.
"""

from typing import Any

import numpy as np

from . import interop
from .interop import Array

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None)})
# torch assumes that memory is aligned to 16 bytes: reading a complex128 at another address ends the process.
_ALIGNMENT = 16


def pack(data: dict[Any, Any], views: bool) -> dict[Any, Any]:
    """Replace each tensor in a copy of ``data``, at any depth, by its bytes; with ``views`` no reader copies it."""
    memo: dict[int, Any] = {}  # keeps shared objects shared, and objects that contain themselves finite
    return {key: _pack(key, value, views, memo) for key, value in data.items()}


def _pack(key: Any, value: Any, views: bool, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        # Only contiguous memory is transferred out of band.
        return value if value.flags.forc else value.copy()
    if id(value) in memo:
        return memo[id(value)]
    if kind is list:
        items: list[Any] = []
        memo[id(value)] = items
        items.extend(item if type(item) in _ATOMS else _pack(key, item, views, memo) for item in value)
        return items
    if kind is dict:
        entries: dict[Any, Any] = {}
        memo[id(value)] = entries
        entries.update((name, _pack(key, item, views, memo)) for name, item in value.items())
        return entries
    if kind is tuple:
        return tuple(_pack(key, item, views, memo) for item in value)
    if interop.is_tensor(value):
        memo[id(value)] = sent = _pack_tensor(key, value, views)
        return sent
    if pack_leaf := getattr(kind, "_pack_leaf", None):
        memo[id(value)] = sent = pack_leaf(value, key, views)
        return sent
    return value


def _pack_tensor(key: Any, tensor: Any, views: bool) -> Any:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"Leaf {key!r} is or holds a tensor on {tensor.device}; only CPU tensors can be pickled. Move it first: "
            f"batch.to_device('cpu') moves leaves; move tensors in lists yourself."
        )
    torch = interop.require_torch()
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_quantized:  # memory, strides and a dtype do not describe it: torch pickles it
        return tensor.detach() if tensor.is_nested else tensor
    if tensor.is_nested:  # of the strided layout, which torch cannot pickle
        return Sent(torch.nested.nested_tensor, [_pack_tensor(key, part, views) for part in tensor.unbind()])
    return Sent(_read, interop.memory(tensor), interop.dtype_name(tensor), views)


class Sent:
    """An object that is pickled as a call that returns the tensor or the leaf."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call[0], self._call[1:]


def _read(array: Array, dtype: str, view: bool) -> Any:
    """Return the tensor whose memory was sent as ``array``."""
    if array.size == 0:
        array, view = np.empty_like(array), True
    elif array.__array_interface__["data"][0] % _ALIGNMENT:
        # Ray aligns buffers below 2 KiB to 8 bytes only. A copy by numpy is aligned.
        array = array.copy(order="K")
    elif not array.flags.writeable:
        array = np.asarray(_Window(array))
    tensor = interop.from_carrier(interop.require_torch().from_numpy(array), dtype)
    # An older protocol has made an array that owns its memory for this reader.
    return tensor if view or array.flags.owndata else tensor.clone()


class _Window:
    """The memory of a read-only array, declared writable: torch warns about read-only memory, and copies it."""

    def __init__(self, array: Array) -> None:
        # numpy keeps this object as the base of the arrays made from it, which keeps the memory alive.
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
