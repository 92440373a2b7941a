# SPDX-License-Identifier: Apache-2.0
"""The requests of a planned call: its arguments, stored once, and the request to each worker."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._start.worker_class import Method
from .._transport.arguments import Arguments, Gathered, NotPicklableError
from .._transport.replies import Request
from .plan import Column, Recipients


def store_columns(
    method: Method, args: Sequence[Column], kwargs: Mapping[str, Column], arguments: Arguments
) -> list[Column]:
    """Store the values that have to be stored, and return the arguments as they are sent."""
    method.check(len(args), tuple(kwargs))
    columns = []
    for at, column in enumerate((*args, *kwargs.values())):
        try:
            columns.append(column.map(arguments.prepare))
        except NotPicklableError as error:
            name = list(kwargs)[at - len(args)] if at >= len(args) else method.parameter(at)
            raise TypeError(f"argument {name!r} of {method.name!r}: {error}") from None
    if method.function is not None:
        columns = [Column([arguments.prepare(method.function)]), *columns]
    return columns


def make_requests(
    method: Method, recipients: Recipients, columns: Sequence[Column], names: Sequence[str]
) -> Sequence[Request]:
    """Return the request to each recipient in order; the last columns are the keyword arguments of these names."""
    same = []
    for column in columns:
        if column.index is None and not isinstance(column.values[0], Gathered):
            same.append(column.values[0])
    if recipients.answers is not None or len(same) < len(columns):
        return list(_make_rows(method, recipients, columns, names))
    positional = len(columns) - len(names)
    args, kwargs = same[:positional], dict(zip(names, same[positional:], strict=True))
    return [make_request(method, {}, args, kwargs)] * len(recipients.called)


def make_request(method: Method, how: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Request:
    """Return the request that runs a method, or the function in its place, as `how` says; see `_fairlead_begin`."""
    if method.function is not None:
        how = {"function": True, **how}
    if not how:
        return Request(method.name, args, kwargs)
    how = {"method": method.name, **how}
    if method.result == "items" and "silent" not in how:  # Ray streams only from generator methods
        return Request("_fairlead_iterate", [how, *args], kwargs, method.backpressure)
    return Request("_fairlead_call", [how, *args], kwargs)


def extend_request(request: Request, method: Method, more: dict[str, Any]) -> Request:
    """Return a request with more conditions of how it is run."""
    if not request.method.startswith("_fairlead_"):
        return make_request(method, more, request.args, request.kwargs)
    how, *args = request.args
    return request._replace(args=[{**how, **more}, *args])


def _make_rows(
    method: Method, recipients: Recipients, columns: Sequence[Column], names: Sequence[str]
) -> Iterator[Request]:
    """Return requests that are not the same for all recipients."""
    gathers = any(isinstance(value, Gathered) for column in columns for value in column.values)
    count, answers = len(recipients.called), recipients.answers
    positional = len(columns) - len(names)
    rows = zip(*(column.expand(count) for column in columns), strict=True) if columns else [()] * count
    for at, row in enumerate(rows):
        how: dict[str, Any] = {}
        args, kwargs = list(row[:positional]), dict(zip(names, row[positional:], strict=True))
        if gathers:
            how["plan"], *args = _flatten(args, kwargs)
            kwargs = {}
        if answers is not None and not answers[at]:
            how["silent"] = True
        yield make_request(method, how, args, kwargs)


def _flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return a plan of the arguments, followed by each single value: Ray finds references at the top level only.

    The plan has a pair `(name or None, number of values or None)` for each argument. The number is None for an argument
    that is not a list.
    """
    plan: list[tuple[str | None, int | None]] = []
    flat: list[Any] = []
    for name, value in (*((None, value) for value in args), *kwargs.items()):
        is_list = isinstance(value, Gathered)
        plan.append((name, len(value.refs) if is_list else None))
        flat.extend(value.refs if is_list else [value])
    return [plan, *flat]
