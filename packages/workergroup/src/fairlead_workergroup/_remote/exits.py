# SPDX-License-Identifier: Apache-2.0
"""The exit of a worker whose async methods overlap. Shipped by value."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from ray.exceptions import AsyncioActorExit

# How long the other methods may clean up when one of them exits.
CLEANUP_S = 5.0


class Exits:
    """A context for code of the user on the event loop. If some of it exits, the worker exits.

    Ray ends a worker for a SystemExit of one of its coroutines, when the others have ended. Ray alone does not cancel
    these, and asyncio stops the loop at a SystemExit, so that Ray never receives it.
    """

    def __init__(self) -> None:
        """Watch the event loop that calls this."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._tasks: set[Any] = set()
        self._exit: SystemExit | None = None
        self._other_hook = threading.excepthook
        threading.excepthook = self._resume

    def _resume(self, stopped: Any) -> None:
        """Run the loop again after a SystemExit has stopped it."""
        error = stopped.exc_value
        if stopped.thread is not self._thread or not isinstance(error, SystemExit):
            self._other_hook(stopped)
            return
        while error is not None:
            self._cancel(error)
            try:
                error = self._loop.run_forever()
            except SystemExit as another:
                error = another

    def _cancel(self, error: SystemExit) -> None:
        if self._exit is None:
            self._exit = error
            for task in self._tasks:
                task.cancel()

    def convert(self, error: BaseException) -> SystemExit | None:
        """If an error is an exit, cancel the other code and return the exit as Ray expects it; for every thread."""
        if isinstance(error, AsyncioActorExit):
            error = SystemExit(0)
        if not isinstance(error, SystemExit):
            return None
        self._loop.call_soon_threadsafe(self._cancel, error)
        return error

    async def __aenter__(self) -> None:
        if self._exit is not None:
            await self._leave(self._exit)
        self._tasks.add(asyncio.current_task())

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._tasks.discard(asyncio.current_task())
        if error is not None and (leaving := self.convert(error) or self._exit) is not None:
            await self._leave(leaving)

    async def _leave(self, error: SystemExit) -> NoReturn:
        """Raise the exit when the other code has ended, or kill the process if it does not end."""
        deadline = time.monotonic() + CLEANUP_S
        while self._tasks:
            if time.monotonic() >= deadline:
                os._exit(1)
            await asyncio.sleep(0.001)
        raise SystemExit(error.code)

    async def iterate(self, items: Any) -> AsyncIterator[Any]:
        """Iterate over the items of an async generator in this context."""
        end = object()
        while True:
            async with self:
                item = await anext(items, end)
            if item is end:
                return
            yield item
