# SPDX-License-Identifier: Apache-2.0
"""The requests of a call as messages."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray
from ray import ObjectRef

from fairlead_workergroup.spi import Message

from ._session import Body

# Types of which Python's own pickle, which is faster, is right for every value.
PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def encode(requests: Iterable[Any]) -> Iterator[tuple[str, Body]]:
    """Yield the method and the content of each request; requests with the same arguments are pickled once."""
    last: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()
    body: Body | None = None
    before: Any = None
    for request in requests:
        if request is before and body is not None:
            yield request.method, body
            continue
        before = request
        values = (*request.args, *request.kwargs.values())
        same = (request.method, tuple(request.kwargs), *map(id, values))
        if body is None or same != last:
            # `values` keeps the objects alive whose identities are compared.
            last, body, kept = same, _encode_one(request.method, request.args, request.kwargs), values
        yield request.method, body
    del kept


def _encode_one(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Body:
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    sources = tuple((key, value) for key, value in named if isinstance(value, (ObjectRef, Message)))
    left = {key for key, _ in sources}
    content = (
        method,
        [None if at in left else value for at, value in enumerate(args)],
        {name: None if name in left else value for name, value in kwargs.items()},
    )
    is_plain = all(_is_plain(value) for key, value in named if key not in left)
    return Body(pickle.dumps(content, 5) if is_plain else ray.cloudpickle.dumps(content), sources)


def _is_plain(value: Any) -> bool:
    """Return whether Python's own pickle, which is faster, is right for a value: its class may be the user's own."""
    if type(value) in (list, tuple):
        return all(type(part) in PLAIN for part in value)
    if type(value) is dict:
        return all(type(part) in PLAIN for part in (*value, *value.values()))
    return type(value) in PLAIN
