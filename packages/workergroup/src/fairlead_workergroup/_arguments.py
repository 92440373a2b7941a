# SPDX-License-Identifier: Apache-2.0
"""The arguments of calls. Small plain values travel with a call; every other value is stored once."""

import inspect
import math
import numbers
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray import ObjectRef
from ray.exceptions import RayError


class _Mark:
    """Stands for other values. Inside an argument it would reach the workers as it is."""

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} is replaced only as a whole argument of `call`: elsewhere, pass its values")


class PassedOn(_Mark):
    """The values of workers that go to other workers without passing through the driver, such as a `Call`."""

    def as_argument(self) -> Any:
        """Return the object that travels in place of the value."""
        raise NotImplementedError

    def as_arguments(self) -> list[ObjectRef[Any]]:
        """Return each value as an argument."""
        raise NotImplementedError


@dataclass(frozen=True, init=False)
class Shard(_Mark):
    """An argument of which each worker gets the piece at its coordinates.

    Args:
        values: nested sequences, one level for each axis: lists, tuples, arrays or tensors (along their first dim),
            or a `Call` with a result for each coordinate.
        axes: the worker at coordinate c along these axes gets piece c. All workers along other axes get the same piece.

    Raises:
        ValueError: no axis is given.

    >>> Shard([["a", "b"]], "dp", "tp").axes
    ('dp', 'tp')
    """

    values: Any
    axes: tuple[str, ...]

    def __init__(self, values: Any, *axes: str) -> None:
        if not axes:
            raise ValueError("Shard needs the axes its values are split along: Shard(values, 'dp')")
        # `__dict__` bypasses the frozen dataclass.
        self.__dict__.update(values=values, axes=axes)


@dataclass(frozen=True)
class PerWorker(_Mark):
    """An argument with a separate value for each called worker.

    Attributes:
        values: one value for each called worker, by ascending rank; or a `Call` with as many results.

    >>> PerWorker([1, 2]).values
    [1, 2]
    """

    values: Sequence[Any] | PassedOn


# Ray stores an argument above 100 kB, and every argument after the first 10 MB of a task, once for each worker. This
# bound for a whole argument stays far below both limits.
INLINE_BYTES = 10_000
INLINE_ITEMS = 16


class NotPicklableError(TypeError):
    """A value cannot be pickled; the text names the part and the reason."""


def is_inlined(value: Any) -> bool:
    """Return whether a value travels with every call: plain ones, or containers of at most 16 of these, up to 10 kB."""
    if type(value) in (list, tuple):
        return len(value) <= INLINE_ITEMS and sum(map(_size, value)) <= INLINE_BYTES
    if type(value) is dict:
        return len(value) <= INLINE_ITEMS and sum(map(_size, value)) + sum(map(_size, value.values())) <= INLINE_BYTES
    return _size(value) <= INLINE_BYTES


def _size(value: Any) -> float:
    """Return the size of a plain value in bytes, and infinity for any other value."""
    kind = type(value)
    if kind is int:
        return value.bit_length() // 8 + 1  # type: ignore[no-any-return]
    if kind is bytes:
        return len(value)
    if kind is str:
        return len(value) if value.isascii() or len(value) > INLINE_BYTES else len(value.encode(errors="surrogatepass"))
    return 8 if value is None or isinstance(value, numbers.Number) else math.inf


class Gathered(tuple[ObjectRef[Any], ...]):
    """An argument that is a list of objects which do not pass through the driver."""


@dataclass(eq=False)
class Arguments:
    """Prepares the arguments of one call: one `put` for each distinct value, by identity, so keep the values alive."""

    refs: dict[int, ObjectRef[Any]] = field(default_factory=dict)  # of the stored values, by identity

    def prepare(self, value: Any) -> Any:
        """Return what travels: an inlined value (lists and dicts copied), or a reference to the one stored copy."""
        if isinstance(value, ObjectRef):
            return value
        if isinstance(value, PassedOn):
            return value.as_argument()
        if is_inlined(value):
            return value.copy() if type(value) in (list, dict) else value
        ref = self.refs.get(id(value))
        if ref is None:
            ref = self.refs[id(value)] = self._store(value)
        return ref

    def _store(self, value: Any) -> ObjectRef[Any]:
        try:
            return ray.put(value)
        except RayError:
            raise
        except Exception as error:  # noqa: BLE001  pickling runs code of the value's own class
            raise NotPicklableError(_explain_failure(value, error)) from None


def _explain_failure(value: Any, error: BaseException) -> str:
    """Return the part of a value that cannot be pickled, and the innermost reason, in one line."""
    path, part, reason = find_unpicklable(value, error)
    where = f"its part {path} of type {type(part).__name__}" if path else f"a {type(part).__name__}"
    # The reason has the remedy if it is one of this project's own objects.
    is_own = type(part).__module__.startswith("fairlead_")
    remedy = "" if is_own else ". Pass what it is made from, or create it in the worker's `__init__`"
    return f"{where} cannot be pickled: {reason}{remedy}"


def find_unpicklable(value: Any, error: BaseException) -> tuple[str, Any, str]:
    """Return the path of the part of a value that cannot be pickled, the part, and the innermost reason."""
    path = ""
    for _ in range(5):
        parts = ((step, part, _pickling_error(part)) for step, part in _parts(value))
        failing = next(((step, part, failed) for step, part, failed in parts if failed is not None), None)
        if failing is None:
            break
        step, value, error = failing
        path += step
    while error.__cause__ is not None:
        error = error.__cause__
    return path, value, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that are pickled with it, each with the expression that leads to it."""
    named: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        yield from ((f"[{key!r:.50}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif inspect.isfunction(value):
        closure = inspect.getclosurevars(value)
        named = [*closure.nonlocals.items(), *closure.globals.items()]
    elif not any("__reduce__" in vars(cls) for cls in type(value).__mro__[:-1]):  # its class decides what is pickled
        named = getattr(value, "__dict__", {}).items()
    yield from ((f".{name}", part) for name, part in named)


def _pickling_error(value: Any) -> Exception | None:
    try:
        ray.cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001  pickling runs code of the value's own class
        return error
    return None
