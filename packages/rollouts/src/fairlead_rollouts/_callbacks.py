# SPDX-License-Identifier: Apache-2.0
"""The functions of the caller, which a ledger calls after each of its changes is complete."""

import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ._model import Ref

__all__ = ["Callbacks", "changes"]

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)


class Callbacks:
    """Collect the calls of one change, and make them at its end.

    An exception of the caller's function is logged, and raised at the next `flush`: the change itself has happened, and
    the caller of the ledger needs what it returns. With a file, a durable payload is released only after the file no
    longer lists it.

    Attributes:
        file: the snapshot file of the ledger, or None.
        errors: exceptions of the caller's functions, since the last `flush`.
        subscribers: functions to call after each change.
        changed: whether the current call has changed the ledger.
    """

    def __init__(self, on_release: Callable[[Ref, str], object] | None) -> None:
        self._on_release = on_release
        self._due: deque[Callable[[], object]] = deque()
        # Releases, each with the number of the first snapshot that does not list its payload.
        self._listed: deque[tuple[int, Callable[[], object]]] = deque()
        self.file: Any = None
        self.errors: list[Exception] = []
        self.subscribers: list[Callable[[], object]] = []
        self.changed = False

    def release(self, ref: Ref, reason: str) -> None:
        """Release a reference, after this change or after the next snapshot."""
        if self._on_release is None:
            return
        call = functools.partial(self._on_release, ref, reason)
        if ref.durable and self.file is not None:
            self._listed.append((self.file.taken + 1, call))
            self.changed = True
        else:
            self._due.append(call)

    def end_change(self) -> None:
        """Collect the calls that are due at the end of a change. The caller holds the lock of the ledger."""
        while self.file is not None and self._listed and self._listed[0][0] <= self.file.written:
            self._due.append(self._listed.popleft()[1])
        if self.changed:
            self.changed = False
            self._due.extend(self.subscribers)
            if self.file is not None:
                self.file.changed = True

    def run(self) -> None:
        """Make the calls that are due, in their order. An interrupt leaves the others to the next change."""
        while self._due:
            try:
                call = self._due.popleft()
            except IndexError:  # another thread has made the last one
                return
            try:
                call()
            except Exception as error:
                logger.exception("A function of the caller failed after a change of the ledger.")
                self.errors.append(error)


def changes(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let a method of a ledger change it under its lock, and make the calls that follow from the change."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        callbacks: Callbacks = self._book.callbacks
        with self._lock:
            result = method(self, *args, **kwargs)
            callbacks.end_change()
        callbacks.run()
        return result

    return cast(Callable[Concatenate[Any, P], R], call)
