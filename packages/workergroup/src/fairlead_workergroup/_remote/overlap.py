# SPDX-License-Identifier: Apache-2.0
"""A lane's end in a worker whose async methods overlap: a coroutine on its event loop. Shipped by value."""

import asyncio
import contextvars
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.exceptions import TaskCancelledError

from .lane import (
    CALL,
    CANCEL,
    END,
    ERROR,
    INLINE,
    ITEM,
    LAST_S,
    MOST_UNACKED,
    NO_TASK,
    STOP,
    VALUE,
    Answer,
    Connection,
    LaneConfig,
    load_request,
    make_answer,
    make_error,
)

# The answers that wait to be sent before the methods that make them wait.
MOST_QUEUED = 64
# How often the coroutine looks at the connection if nothing happens.
LOOK_S = 1.0
BRIEF_S = 0.005


class _Calls:
    """The calls that run, and their answers in the order in which they are made."""

    def __init__(self, find: Callable[[str], Callable[..., Any]], running: contextvars.ContextVar[bytes]) -> None:
        self.wake: asyncio.Event = asyncio.Event()
        self.tasks: dict[bytes, asyncio.Task[None]] = {}
        self.answers: asyncio.Queue[tuple[int, int, Answer]] = asyncio.Queue(MOST_QUEUED)
        self._find = find
        self._running = running

    def start(self, call: int, task: bytes, frames: list[bytes]) -> None:
        """Start a call."""
        self.tasks[task] = asyncio.get_running_loop().create_task(self._run(call, task, frames))

    def cancel(self, task: bytes) -> None:
        """Cancel a call that runs."""
        if (running := self.tasks.get(task)) is not None:
            running.cancel()

    async def _run(self, call: int, task: bytes, frames: list[bytes]) -> None:
        self._running.set(task)
        name = "a request"
        try:
            name, args, kwargs = load_request(frames)
            result = self._find(name)(*args, **kwargs)
            del args, kwargs
            if inspect.isasyncgen(result):
                async for item in result:
                    await self._answer(ITEM, call, make_answer(item))
                kind, answer = END, Answer(INLINE)
            elif inspect.isgenerator(result):
                for item in result:
                    await self._answer(ITEM, call, make_answer(item))
                kind, answer = END, Answer(INLINE)
            else:
                kind, answer = VALUE, make_answer(await result if inspect.isawaitable(result) else result)
        except (SystemExit, GeneratorExit):
            raise
        except asyncio.CancelledError:
            kind, answer = ERROR, make_error(name, TaskCancelledError())
        except BaseException as error:  # noqa: BLE001  the caller gets it
            kind, answer = ERROR, make_error(name, error)
        result = None
        self.tasks.pop(task, None)
        await self._answer(kind, call, answer)

    async def _answer(self, kind: int, call: int, answer: Answer) -> None:
        await self.answers.put((kind, call, answer))
        self.wake.set()


async def serve_overlapping(
    config: LaneConfig,
    find: Callable[[str], Callable[..., Any]],
    name_task: Callable[[Callable[[], bytes] | None], None],
) -> AsyncIterator[Any]:
    """Run the calls that arrive by a lane at the same time, until the driver ends it; see `serve`.

    Yields:
        The answers that the driver gets through the object store.
    """
    running: contextvars.ContextVar[bytes] = contextvars.ContextVar("fairlead_lane_task", default=NO_TASK)
    loop = asyncio.get_running_loop()
    connection = Connection(config)
    calls = _Calls(find, running)
    name_task(running.get)
    files = connection.files()
    for file in files:
        loop.add_reader(file, calls.wake.set)
    stopping = False
    try:
        while True:
            while connection.look(0):
                pass
            while (message := connection.take()) is not None:
                kind, call, task, frames = message
                if kind == CALL:
                    calls.start(call, task, frames)
                elif kind == CANCEL:
                    calls.cancel(task)
                stopping = stopping or kind == STOP
            while not calls.answers.empty() and connection.unacknowledged < MOST_UNACKED:
                kind, call, answer = calls.answers.get_nowait()
                connection.send(kind, answer.form, call, answer.frames)
                if answer.form != INLINE:
                    yield answer.stored
                del answer
            if stopping and not calls.tasks and calls.answers.empty():
                break
            # The files announce a message once only, and sending may have taken the announcement.
            while connection.look(0):
                pass
            if not connection.has_message and (calls.answers.empty() or connection.unacknowledged >= MOST_UNACKED):
                try:
                    await asyncio.wait_for(calls.wake.wait(), LOOK_S)
                except TimeoutError:
                    continue
            calls.wake.clear()
        connection.say_goodbye()
        ended = loop.time() + LAST_S
        while connection.unacknowledged and loop.time() < ended:
            await asyncio.sleep(BRIEF_S)
            connection.look(0)
    finally:
        for file in files:
            loop.remove_reader(file)
        name_task(None)
        connection.close()
