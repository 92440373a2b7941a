# SPDX-License-Identifier: Apache-2.0
"""The options of a group as frozen values, and the keywords that stand for some of them."""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from ._calls.map import Strategy
from ._context import Compression
from ._model import Restart
from ._start.environment import WorkerOptions
from ._world import check_timeout

_Option = TypeVar("_Option")
UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}}
UNITS |= {unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How a group changes its members while it runs.

    Attributes:
        on_resize: a method of the class, without arguments, that all workers run in the new epoch of a `resize`, such
            as one that sets up the collectives again.
    """

    on_resize: str | None = None


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the start and the calls of a group may take.

    Attributes:
        start_s: the seconds that all constructors together may take.
        call_s: the timeout in seconds of a `call` without one of its own; None for no limit.
    """

    start_s: float = 600.0
    call_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.start_s < math.inf:
            raise ValueError(f"start_s must be positive and finite, got {self.start_s!r}")
        check_timeout("call_s", self.call_s)


class FlatOptions(TypedDict, total=False):
    """The keywords that stand for parts of other options, or for defaults of methods."""

    restart_on_failure: bool
    max_restarts: int
    enable_load_balancing: bool
    load_balancing_strategy: Strategy
    enable_gradient_compression: bool | Compression


def read_option(name: str, value: _Option | None, kind: type[_Option]) -> _Option:
    """Return an option, and its default for None; refuse a value of another type."""
    if value is not None and not isinstance(value, kind):
        what = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        example = "on_failure=True" if kind is Restart else "..."
        raise TypeError(f"{name} must be {what} or None, got {value!r}: write {name}={kind.__name__}({example})")
    return kind() if value is None else value


def read_restart(restart: Restart | None, flat: Mapping[str, Any], constructor: Callable[..., None]) -> Restart:
    """Return how a group restarts lost workers; refuse keywords that its constructor does not have."""
    for name in flat.keys() - FlatOptions.__annotations__.keys():
        raise TypeError(f"RayWorkerGroup has no parameter {name!r}. Did you mean {_find_nearest(name, constructor)}?")
    fields_of = {"restart_on_failure": "on_failure", "max_restarts": "max_restarts"}
    given = {field: flat[name] for name, field in fields_of.items() if name in flat}
    if restart is not None and given:
        raise TypeError(f"restart= replaces {' and '.join(fields_of)}, so they cannot be given together")
    return Restart(**given) if given else read_option("restart", restart, Restart)


def _find_nearest(name: str, constructor: Callable[..., None]) -> str:
    """Return how the parameter, or the field of a value, whose name is the most like this one is written."""
    written = {name: f"{name}=" for name in (*inspect.signature(constructor).parameters, *FlatOptions.__annotations__)}
    values = {"restart": Restart, "elastic": Elastic, "worker": WorkerOptions, "timeouts": Timeouts}
    for parameter, value in values.items():
        written |= {field.name: f"{parameter}={value.__name__}({field.name}=...)" for field in fields(value)}
    return written[difflib.get_close_matches(name, written.keys() - {"self", "flat"}, 1, 0.0)[0]]


def parse_memory(size: int | str) -> int:
    """Return a number of bytes, given as a number, or as text such as "8GB" (powers of 1000) or "512MiB" (of 1024).

    Raises:
        ValueError: the size is neither, or it is not positive.

    >>> parse_memory("1.5GB"), parse_memory("2KiB"), parse_memory(100)
    (1500000000, 2048, 100)
    """
    wrong = f"a memory limit is a positive number of bytes, or text such as '8GB' or '512MiB', got {size!r}"
    if isinstance(size, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if parts is None or parts[2].upper() not in UNITS:
            raise ValueError(wrong)
        size = int(float(parts[1]) * UNITS[parts[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(wrong)
    return size
