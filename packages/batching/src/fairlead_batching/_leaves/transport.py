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

_CONTAINERS = frozenset({dict, list, tuple})
# torch assumes that memory is aligned to 16 bytes: reading a complex128 at another address ends the process.
_ALIGNMENT = 16


def pack(leaves: dict[str, Any], views: bool) -> dict[str, Any]:
    """Replace each tensor in a copy of ``leaves`` by its bytes; with ``views`` no reader copies it."""
    memo: dict[int, Any] = {}  # keeps shared leaves shared
    return {key: _pack(key, leaf, views, memo) for key, leaf in leaves.items()}


def _pack(key: str, leaf: Any, views: bool, memo: dict[int, Any]) -> Any:
    interop.check_kind(key, leaf)
    if type(leaf) is np.ndarray:
        # Only contiguous memory is transferred out of band.
        return leaf if leaf.flags.forc else leaf.copy()
    if type(leaf) in _CONTAINERS:
        _refuse_tensors(key, leaf, set())
    elif id(leaf) in memo:
        return memo[id(leaf)]
    elif interop.is_tensor(leaf):
        memo[id(leaf)] = sent = _pack_tensor(key, leaf, views)
        return sent
    elif pack_leaf := getattr(type(leaf), "_pack_leaf", None):
        memo[id(leaf)] = sent = pack_leaf(leaf, key, views)
        return sent
    return leaf


def _refuse_tensors(key: str, container: Any, seen: set[int]) -> None:
    """Refuse a list, tuple or dictionary that holds a tensor at any depth."""
    seen.add(id(container))
    for item in container.values() if isinstance(container, dict) else container:
        if type(item) in _CONTAINERS and id(item) not in seen:
            _refuse_tensors(key, item, seen)
        elif interop.is_tensor(item):
            raise TypeError(
                f"Leaf {key!r} is a {type(container).__name__} or holds one with a tensor in it, and only leaves of "
                f"tensors are sent: make a leaf or a RaggedLeaf of them, or convert them to numpy arrays."
            )


def _pack_tensor(key: Any, tensor: Any, views: bool) -> Any:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"Leaf {key!r} is or holds a tensor on {tensor.device}; only CPU tensors can be pickled. Move it first: "
            f"batch.to_device('cpu')."
        )
    torch = interop.require_torch()
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_quantized:  # memory, strides and a dtype do not describe it: torch pickles it
        return tensor
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
