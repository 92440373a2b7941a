# SPDX-License-Identifier: Apache-2.0
"""What a caller wraps an argument in, when not every worker is to get the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PassedOn", "PerWorker", "Shard"]


class PassedOn:
    """What stands for values that workers have made, and goes on to other workers without passing through the driver.

    A `Call` is one.
    """

    def as_argument(self) -> Any:
        """What travels in place of the value."""
        raise NotImplementedError

    def as_pieces(self) -> list[Any]:
        """What travels in place of each of several values."""
        raise NotImplementedError


@dataclass(frozen=True, init=False)
class Shard:
    """An argument of which each worker gets the piece at its coordinates.

    Args:
        values: nested sequences, one level for each axis: lists, tuples, arrays or tensors (along their first dim),
            or a `Call` that has an answer for each coordinate.
        axes: the worker at coordinate c along them gets piece c; everybody along other axes gets the same one.

    Raises:
        ValueError: no axis is named.

    >>> Shard([["a", "b"]], "dp", "tp").axes
    ('dp', 'tp')
    """

    values: Any
    axes: tuple[str, ...]

    def __init__(self, values: Any, *axes: str) -> None:
        if not axes:
            raise ValueError("Shard needs the axes its values are split along: Shard(values, 'dp')")
        # Past the refusal of a frozen dataclass to have its fields set.
        self.__dict__.update(values=values, axes=axes)


@dataclass(frozen=True)
class PerWorker:
    """An argument with a value of its own for every worker called.

    Attributes:
        values: one for each worker that is called, by ascending rank; or a `Call` with as many answers.

    >>> PerWorker([1, 2]).values
    [1, 2]
    """

    values: Sequence[Any] | PassedOn
