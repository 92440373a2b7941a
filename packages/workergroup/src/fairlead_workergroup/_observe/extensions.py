# SPDX-License-Identifier: Apache-2.0
"""Extensions of worker groups: installed packages that observe calls and add code to workers.

A package names a function in the entry point group `fairlead_workergroup.extensions`. It is called with each group that
this process makes, before its workers start, with each handle that is used here, and with the group's id. An extension
that raises is reported once, and the group works without it.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from typing import Any

ENTRY_POINTS = "fairlead_workergroup.extensions"
logger = logging.getLogger("fairlead_workergroup")

Extension = Callable[[Any, str], object]


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


@functools.cache
def load_extensions() -> list[tuple[str, Extension]]:
    """Return the installed extensions with their names. Those that cannot be imported are reported and left out."""
    found = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found.append((entry.value, entry.load()))
        except Exception:
            logger.warning("The extension %s of worker groups cannot be imported.", entry.value, exc_info=True)
    return found


def extend(group: object, group_id: str) -> None:
    """Let the extensions see a new group or handle; one that raises is not used any more in this process."""
    extensions = load_extensions()
    for one in list(extensions):
        name, extension = one
        try:
            extension(group, group_id)
        except Exception:
            extensions[:] = [other for other in extensions if other is not one]
            logger.warning("The extension %s of worker groups failed. It is not used any more.", name, exc_info=True)
