# SPDX-License-Identifier: Apache-2.0
"""The put rule: small plain values travel with the call, everything else is stored once and passed by reference."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef

from ._marks import PassedOn
from ._ray_private import object_sizes

__all__ = ["Arguments", "Gathered", "is_inlined"]

INLINE_BYTES = 10_000
INLINE_ITEMS = 16


def is_inlined(value: Any) -> bool:
    """Whether a value travels with every call instead of being stored.

    None, bool, numbers, str and bytes up to 10 kB, and tuples, lists and dicts of at most 16 such.

    >>> is_inlined(3), is_inlined({"lr": 0.1}), is_inlined("x" * 20_000), is_inlined([[1]])
    (True, True, False, False)
    """
    if type(value) in (list, tuple):
        return len(value) <= INLINE_ITEMS and all(map(_is_scalar, value))
    if type(value) is dict:
        return len(value) <= INLINE_ITEMS and all(_is_scalar(k) and _is_scalar(v) for k, v in value.items())
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if type(value) in (str, bytes):
        return len(value) <= INLINE_BYTES
    return value is None or isinstance(value, numbers.Number)


@dataclass(frozen=True)
class Gathered:
    """An argument that is the list of several objects, none of which passes through the driver."""

    refs: tuple[ObjectRef[Any], ...]


class Arguments:
    """Prepares the arguments of one call: one put per distinct value, by identity.

    Keep the values alive while this lives: identity is all that tells them apart.

    Args:
        put: what stores a value and returns the reference to it.

    >>> arguments = Arguments()
    >>> arguments.prepared(3), arguments.puts
    (3, 0)
    """

    def __init__(self, put: Callable[[Any], Any] = ray.put) -> None:
        self._put = put
        self._refs: dict[int, ObjectRef[Any]] = {}

    def prepared(self, value: Any) -> Any:
        """The value itself if it is inlined or already a reference, else a reference to the one stored copy.

        A `Call` goes on as the references to its answers.
        """
        if isinstance(value, ObjectRef) or is_inlined(value):
            return value
        if isinstance(value, PassedOn):
            return value.as_argument()
        ref = self._refs.get(id(value))
        if ref is None:
            ref = self._refs[id(value)] = self._put(value)
        return ref

    @property
    def refs(self) -> list[ObjectRef[Any]]:
        """What was stored."""
        return list(self._refs.values())

    @property
    def puts(self) -> int:
        """How many values were stored."""
        return len(self._refs)

    @property
    def bytes_put(self) -> int:
        """How large they are, as Ray stores them."""
        return sum(object_sizes(self.refs))
