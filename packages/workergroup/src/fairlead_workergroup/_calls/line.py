# SPDX-License-Identifier: Apache-2.0
"""A queue for calls that are made in a coroutine, so that sending them never blocks its event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fairlead_placement.spi import never_connect

__all__ = ["Line", "on_event_loop"]


def on_event_loop() -> bool:
    """Return whether this code runs on an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Line:
    """Runs functions in order on a background thread, which exists only while there is work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether a function is running or waits to run."""
        return self._busy

    def add(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue a function; return a future of its result, which can be cancelled until the function starts."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._busy:
                threading.Thread(target=self._serve, name="fairlead-calls", daemon=True).start()
                self._busy = True
            self._waiting.append((future, work))
        return future

    def _serve(self) -> None:
        never_connect()
        while (following := self._next()) is not None:
            future, work = following
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  raised by whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)
            del following, future, work  # so that their values are not kept alive until the next one

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._busy = False
            return None
