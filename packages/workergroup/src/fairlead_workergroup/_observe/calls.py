# SPDX-License-Identifier: Apache-2.0
"""Observed calls: the outcome of each worker, and observers."""

import functools
import logging
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
