# SPDX-License-Identifier: Apache-2.0
"""Observed calls: the outcome of each worker, the cost of a call, the counts of a group, and observers."""

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .display import record_html

logger = logging.getLogger("fairlead_workergroup")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on one worker, or one item that the worker yielded.

    Attributes:
        rank: the number of the worker in the group.
        coords: its coordinates in the group, by axis.
        value: the value that it returned; None if it failed.
        error: the exception that it raised; None if it did not fail.
    """

    rank: int
    coords: Mapping[str, int] = field(hash=False)
    value: Any = None
    error: BaseException | None = None

    _repr_html_ = record_html


@dataclass(frozen=True)
class CallStatistics:
    """The cost of one call.

    Attributes:
        requests: method calls sent to workers.
        puts: values stored in the object store for it.
        bytes_put: their size in bytes, as stored.
        fetched: results fetched to the driver so far.
        bytes_fetched: their size in bytes, as sent.
        submit_s: seconds from the call to the last request.
    """

    requests: int
    puts: int
    bytes_put: int
    fetched: int
    bytes_fetched: int
    submit_s: float

    _repr_html_ = record_html


@dataclass(frozen=True)
class GroupStatistics:
    """The counts since the group was created, which include its constructor arguments.

    Attributes:
        calls: calls of the group.
        requests: method calls sent to workers.
        puts: values stored in the object store for them.

    >>> print(GroupStatistics(calls=1, requests=8, puts=2))
    put 2 values, sent 8 requests in 1 calls
    """

    calls: int = 0
    requests: int = 0
    puts: int = 0

    _repr_html_ = record_html

    def __str__(self) -> str:
        return f"put {self.puts} values, sent {self.requests} requests in {self.calls} calls"


class Counters:
    """Count what a group stores and sends."""

    def __init__(self) -> None:
        # By thread, each of which changes its own counts only, so that none waits for another one.
        self._counts: dict[tuple[int, str], int] = {}

    @property
    def now(self) -> GroupStatistics:
        """The counts so far."""
        total: Counter[str] = Counter()
        for (_, name), count in [*self._counts.items()]:
            total[name] += count
        return GroupStatistics(**total)

    def add(self, **more: int) -> None:
        """Add to counts, given by name."""
        me = threading.get_ident()
        for name, count in more.items():
            self._counts[me, name] = self._counts.get((me, name), 0) + count


class CallObserver:
    """Observe the calls of a group, on any thread of the process that makes them. Override what you need."""

    def begin(self, name: str, began: float, futures: Sequence[Any]) -> int:
        """Note a call made at a time of `time.monotonic`, or without futures another span; return its number, or 0."""
        return 0

    def end(self, numbers: Sequence[int], *, failed: bool = False) -> None:
        """Note that the caller has the results of these calls, or their error. A call may end more than once."""

    def mark(self, text: str) -> None:
        """Note something that has gone wrong at this moment."""

    def explain(self, error: BaseException) -> None:
        """Add notes to an error about workers that is about to be raised."""


class ObservedCalls(CallObserver):
    """The observer of the calls of one group, if there is one. One that raises is reported, and dropped."""

    def observe(self, observer: CallObserver) -> None:
        """Use an observer from now on."""
        if vars(self):
            raise ValueError(f"These calls are observed by {self.begin.args[0]!r} already.")  # type: ignore[attr-defined]
        for name in ("begin", "end", "mark", "explain"):
            setattr(self, name, functools.partial(self._tell, observer, getattr(observer, name)))

    def _tell(self, observer: CallObserver, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception:
            vars(self).clear()
            logger.warning("%r failed, and does not observe the calls of its group any more.", observer, exc_info=True)
            return 0
