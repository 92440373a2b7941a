# SPDX-License-Identifier: Apache-2.0
"""The one way a call reaches workers: columns of arguments in, a request to each worker out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._arguments import Arguments, Gathered, NotPicklableError
from .._start.worker_class import Method
from .plan import Column

__all__ = ["Request", "requests", "send"]


class Request(NamedTuple):
    """What one worker is asked: a method of its host, the arguments, and the back-pressure its host does not know."""

    method: str
    args: list[Any]
    kwargs: dict[str, Any]
    backpressure: int | None = None


def requests(
    count: int,
    method: Method,
    args: Sequence[Column],
    kwargs: Mapping[str, Column],
    *,
    answers: Sequence[bool] | None,
    arguments: Arguments,
) -> Iterator[Request]:
    """Store the values that have to be stored, and return what each of `count` workers is asked, in order.

    Raises:
        TypeError: the method does not take these arguments, and nothing has been stored; or one cannot be pickled.
    """
    method.check(args, kwargs)
    columns = []
    for at, column in enumerate((*args, *kwargs.values())):
        try:
            columns.append(column.mapped(arguments.prepared))
        except NotPicklableError as error:
            name = list(kwargs)[at - len(args)] if at >= len(args) else method.parameter(at)
            raise TypeError(f"argument {name!r} of {method.name!r}: {error}") from None
    if method.function is not None:
        columns = [Column([method.name]), Column([arguments.prepared(method.function)]), *columns]
        args = [*columns[:2], *args]
    return _rows(count, method, columns, len(args), list(kwargs), answers)


def _rows(
    count: int,
    method: Method,
    columns: Sequence[Column],
    positional: int,
    names: Sequence[str],
    answers: Sequence[bool] | None,
) -> Iterator[Request]:
    hosted = method.hosted
    gathers = any(isinstance(value, Gathered) for column in columns for value in column.values)
    rows = zip(*(column.over(count) for column in columns), strict=True) if columns else [()] * count
    for at, row in enumerate(rows):
        name = hosted
        mine, named = list(row[:positional]), dict(zip(names, row[positional:], strict=True))
        if gathers:
            flat = _flattened(mine, named)
            # A method of a host that streams must be a generator itself.
            name, mine, named = f"_fairlead_gathered_{method.result}", [name, *flat], {}
        if answers is not None and not answers[at]:
            name, mine = "_fairlead_silent", [name, *mine]
        yield Request(name, mine, named, method.backpressure if name == "_fairlead_gathered_items" else None)


def _flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """A plan of the arguments, then every value of them by itself: Ray looks for references at the top only.

    The plan has a (name or None, number of values or None) for each argument: None for one that is no list.
    """
    plan: list[tuple[str | None, int | None]] = []
    flat: list[Any] = []
    for name, value in (*((None, value) for value in args), *kwargs.items()):
        several = isinstance(value, Gathered)
        plan.append((name, len(value.refs) if several else None))
        flat.extend(value.refs if several else [value])
    return [plan, *flat]


def send(handle: Any, request: Request) -> Any:
    """Launch a method call; its future."""
    method = getattr(handle, request.method)
    if request.backpressure is not None:
        method = method.options(_generator_backpressure_num_objects=request.backpressure)
    return method.remote(*request.args, **request.kwargs)
