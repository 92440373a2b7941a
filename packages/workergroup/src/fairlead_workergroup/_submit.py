# SPDX-License-Identifier: Apache-2.0
"""The one way a call reaches workers: columns of arguments in, futures out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._arguments import Arguments
from ._worker_class import Method

__all__ = ["Column", "submit"]


@dataclass(frozen=True)
class Column:
    """One argument of a call, over all called workers.

    Attributes:
        values: the distinct values.
        index: which of them each called worker gets, -1 for None; None if all get the only one.
    """

    values: Sequence[Any]
    index: Sequence[int] | None = None

    def prepared(self, arguments: Arguments) -> "Column":
        return Column([arguments.prepared(value) for value in self.values], self.index)

    def of(self, at: int) -> Any:
        """The value for the called worker number `at`."""
        if self.index is None:
            return self.values[0]
        return None if self.index[at] < 0 else self.values[self.index[at]]


def submit(
    handles: Sequence[Any],
    method: Method,
    args: Sequence[Column],
    kwargs: Mapping[str, Column],
    *,
    answers: Sequence[bool] | None = None,
) -> tuple[list[Any], Arguments]:
    """Store what has to be stored, then launch one method call per handle.

    Args:
        handles: the actors to call, in order.
        method: what to call.
        args: positional arguments.
        kwargs: keyword arguments.
        answers: whether each one's result is wanted; None: all. Others return nothing.

    Returns:
        The futures, one per handle, and what was stored for the call.

    Raises:
        TypeError: the method does not take these arguments; nothing has been stored or launched.
    """
    method.check(args, kwargs)
    arguments = Arguments()
    args = [column.prepared(arguments) for column in args]
    kwargs = {name: column.prepared(arguments) for name, column in kwargs.items()}
    futures = []
    for at, handle in enumerate(handles):
        mine = [column.of(at) for column in args]
        named = {name: column.of(at) for name, column in kwargs.items()}
        if answers is None or answers[at]:
            futures.append(getattr(handle, method.name).remote(*mine, **named))
        else:
            futures.append(handle._fairlead_silent.remote(method.name, *mine, **named))
    return futures, arguments
