# SPDX-License-Identifier: Apache-2.0
"""A lane's end in a worker whose async methods overlap: a coroutine on its event loop. Shipped by value."""

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.exceptions import AsyncioActorExit, TaskCancelledError

from .links import DriverLostError, LaneConfig
from .serve import (
    BEGUN,
    CALL,
    CANCEL,
    END,
    ERROR,
    INLINE,
    ITEM,
    LAST_S,
    MOST_UNACKED,
    STOP,
    VALUE,
    Answer,
    Connection,
    fill,
    make_answer,
    make_error,
    read_request,
)

# The answers that wait to be sent before the methods that make them wait.
MOST_QUEUED = 64
# How often the coroutine looks at the connection if nothing happens, and while it waits for the driver at both ends.
LOOK_S = 1.0
BRIEF_S = 0.005


class _Calls:
    """The calls that run, and their answers in the order in which they are made.

    An answer is sent by the coroutine that has made it, because the next one may block the loop. `answers` has those
    for which that is not possible; no call begins or goes on to its next item while there are any.
    """

    def __init__(
        self,
        connection: Connection,
        find: Callable[[str], Callable[..., Any]],
        running: contextvars.ContextVar[bytes],
    ) -> None:
        self._connection = connection
        self.wake: asyncio.Event = asyncio.Event()
        self.answers: asyncio.Queue[tuple[int, int, Answer]] = asyncio.Queue(MOST_QUEUED)
        # The calls whose last answer is not among `answers` yet.
        self.unfinished = 0
        # Those that have not begun.
        self.waiting: set[bytes] = set()
        # The exit that a call has asked for.
        self.exit: BaseException | None = None
        self._find = find
        self._running = running
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        # A coroutine that asyncio cancels before its first step would not answer.
        self._begun: set[bytes] = set()
        self._cancelled: set[bytes] = set()
        # Calls begin in their order, also if an argument has to be fetched.
        self._turn = asyncio.Lock()

    def start(self, call: int, task: bytes, frames: list[bytes]) -> None:
        self.unfinished += 1
        self.waiting.add(task)
        self._tasks[task] = asyncio.get_running_loop().create_task(self._run(call, task, frames))

    def cancel(self, task: bytes) -> None:
        """Cancel a call that has not ended."""
        if task in self._begun:
            self._tasks[task].cancel()
        elif task in self._tasks:
            self._cancelled.add(task)

    async def _run(self, call: int, task: bytes, frames: list[bytes]) -> None:
        self._running.set(task)
        self._begun.add(task)
        try:
            kind, answer = await self._find_answer(call, task, frames)
            await self._answer(kind, call, answer)
        except (AsyncioActorExit, SystemExit) as error:
            self.exit = error
        finally:
            self.unfinished -= 1
            self.wake.set()

    async def _find_answer(self, call: int, task: bytes, frames: list[bytes]) -> tuple[int, Answer]:
        """Run a call, and send its items; return the kind of its last answer, and that answer."""
        name = "a request"
        try:
            if task in self._cancelled:
                raise asyncio.CancelledError
            async with self._turn:
                name, args, kwargs, refs = read_request(frames)
                if refs:
                    values = await asyncio.gather(*refs.values())
                    fill(args, kwargs, zip(refs, values, strict=True))
                    del values
                await self.answers.join()
            del refs
            # A coroutine goes on below to its first wait.
            self.waiting.discard(task)
            self.wake.set()
            result = self._find(name)(*args, **kwargs)
            del args, kwargs
            if inspect.isasyncgen(result):
                async for item in result:
                    await self._answer(ITEM, call, make_answer(item))
                    await self.answers.join()
                return END, Answer(INLINE)
            if inspect.isgenerator(result):
                for item in result:
                    await self._answer(ITEM, call, make_answer(item))
                    await self.answers.join()
                return END, Answer(INLINE)
            return VALUE, make_answer(await result if inspect.isawaitable(result) else result)
        except (AsyncioActorExit, GeneratorExit, SystemExit):
            raise
        except asyncio.CancelledError:
            return ERROR, make_error(name, TaskCancelledError())
        except BaseException as error:  # noqa: BLE001  the caller gets it
            return ERROR, make_error(name, error)
        finally:
            self.waiting.discard(task)
            del self._tasks[task]
            self._begun.discard(task)
            self._cancelled.discard(task)

    async def _answer(self, kind: int, call: int, answer: Answer) -> None:
        connection = self._connection
        if answer.form == INLINE and self.answers.empty() and connection.unacknowledged < MOST_UNACKED:
            with contextlib.suppress(DriverLostError):  # which ends the lane when it receives
                connection.send(kind, INLINE, call, answer.frames)
        else:
            await self.answers.put((kind, call, answer))
            self.wake.set()


async def serve_overlapping(
    config: LaneConfig,
    find: Callable[[str], Callable[..., Any]],
    name_task: Callable[[Callable[[], bytes] | None], None],
) -> AsyncIterator[Any]:
    """Run the calls that arrive by a lane at the same time, until the driver ends it, as `serve` does."""
    running: contextvars.ContextVar[bytes] = contextvars.ContextVar("fairlead_lane_task", default=b"")
    loop = asyncio.get_running_loop()
    connection = Connection(config, waits=False)
    calls = _Calls(connection, find, running)
    # While the lane is open, Ray runs the calls that leave it.
    name_task(running.get)
    files: list[int] = []
    stopping = told = False
    try:
        while not connection.is_welcome:  # until then it may connect again
            if not connection.look():
                await asyncio.sleep(BRIEF_S)
        files = connection.files()
        for file in files:
            loop.add_reader(file, calls.wake.set)
        while True:
            while connection.look():
                pass
            while (message := connection.take()) is not None:
                kind, call, task, frames = message
                if kind == CALL:
                    calls.start(call, task, frames)
                elif kind == CANCEL:
                    calls.cancel(task)
                stopping = stopping or kind == STOP
            if calls.exit is not None:
                raise calls.exit
            if stopping and not told and not calls.waiting:
                connection.send(BEGUN, INLINE, 0)
                told = True
            while not calls.answers.empty() and connection.unacknowledged < MOST_UNACKED:
                kind, call, answer = calls.answers.get_nowait()
                connection.send(kind, answer.form, call, answer.frames)
                if answer.form != INLINE:
                    yield answer.stored
                calls.answers.task_done()
                del answer
            if stopping and not calls.unfinished and calls.answers.empty():
                break
            # The files announce a message once only, and sending may have taken the announcement.
            while connection.look():
                pass
            if not connection.has_message and (calls.answers.empty() or connection.unacknowledged >= MOST_UNACKED):
                # Not `wait_for`: before Python 3.12 it may suppress the cancellation by a method that exits.
                try:
                    async with asyncio.timeout(LOOK_S):
                        await calls.wake.wait()
                except TimeoutError:
                    continue
            calls.wake.clear()
        connection.say_goodbye()
        ended = loop.time() + LAST_S
        while connection.unacknowledged and loop.time() < ended:
            await asyncio.sleep(BRIEF_S)
            connection.look()
    finally:
        for file in files:
            loop.remove_reader(file)
        name_task(None)
        connection.close()
