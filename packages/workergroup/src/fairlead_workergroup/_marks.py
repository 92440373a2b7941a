# SPDX-License-Identifier: Apache-2.0
"""What a caller wraps an argument in, when not every worker is to get the same."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["Answer", "PassedOn", "PerWorker", "Shard", "refusing_marks"]

_storing = threading.local()


@contextlib.contextmanager
def refusing_marks() -> Iterator[None]:
    """Refuse to pickle a mark on this thread meanwhile: one that is inside an argument would reach workers as it is."""
    _storing.arguments = True
    try:
        yield
    finally:
        _storing.arguments = False


def _check_not_nested(mark: object) -> None:
    if getattr(_storing, "arguments", False):
        name = type(mark).__name__
        raise TypeError(f"a {name} inside an argument is not split; make the whole argument the {name}")


class PassedOn:
    """What stands for values that workers have made, and goes on to other workers without passing through the driver.

    A `Call` is one.
    """

    def made_by(self) -> str:
        """Return the name of the method that makes them."""
        raise NotImplementedError

    def as_argument(self) -> Any:
        """What travels in place of the value."""
        raise NotImplementedError

    def as_pieces(self) -> list[Any]:
        """What travels in place of each of several values."""
        raise NotImplementedError

    def answers(self) -> list["Answer"]:
        """Return each of several values as an argument."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} inside an argument cannot be passed on; make it an argument itself")


@dataclass(frozen=True)
class Answer(PassedOn):
    """One of the answers of a call, on its way to another one.

    Attributes:
        method: the name of the method that makes it.
        ref: the reference to it.
    """

    method: str
    ref: Any

    def made_by(self) -> str:
        """Return the name of the method."""
        return self.method

    def as_argument(self) -> Any:
        """Return the reference."""
        return self.ref


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

    def __reduce__(self) -> tuple[Any, ...]:
        _check_not_nested(self)
        return type(self), (self.values, *self.axes)


@dataclass(frozen=True)
class PerWorker:
    """An argument with a value of its own for every worker called.

    Attributes:
        values: one for each worker that is called, by ascending rank; or a `Call` with as many answers.

    >>> PerWorker([1, 2]).values
    [1, 2]
    """

    values: Sequence[Any] | PassedOn

    def __reduce__(self) -> tuple[Any, ...]:
        _check_not_nested(self)
        return type(self), (self.values,)
