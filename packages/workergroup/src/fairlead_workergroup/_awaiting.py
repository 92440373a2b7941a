# SPDX-License-Identifier: Apache-2.0
"""Waiting for a call without blocking an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ray import ObjectRefGenerator

from ._outcome import Outcome
from ._results import REPORT_EVERY_S
from .exceptions import WorkerFailureError

if TYPE_CHECKING:
    from ._call import Call

__all__ = ["as_completed", "awaited"]


async def awaited(call: Call) -> Any:
    """What `Call.result` returns; the first failure ends the wait, or has the call repeated."""
    while True:
        attempt = call._attempt
        try:
            return call._shaped(await _collected(call))
        except WorkerFailureError:
            # A restart takes seconds.
            if not await asyncio.to_thread(call._repeated, attempt):
                raise


async def _collected(call: Call) -> list[Any]:
    call._check_open()
    tasks = [asyncio.ensure_future(_value_of(call, at)) for at in range(len(call.futures))]
    pending = set(tasks)
    try:
        while pending:
            left = call._deadline.left(at_most=REPORT_EVERY_S)
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if (error := task.exception()) is not None:
                    raise await asyncio.to_thread(call._failure, error)  # it may look at the nodes
            if pending and not done:
                await asyncio.to_thread(call._on_slow, call._deadline)
    finally:
        await _dropped(pending)
    call._check_open()
    return [tasks[at].result() for at in call._positions[0]]


async def as_completed(call: Call) -> AsyncIterator[Outcome]:
    """The outcomes of workers as they finish: of those that answer, and of others that failed."""
    call._group._check_connected()
    tasks = {asyncio.ensure_future(_value_of(call, at)): at for at in range(len(call.futures))}
    try:
        while tasks:
            left = call._deadline.left(at_most=REPORT_EVERY_S)
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await asyncio.to_thread(call._on_slow, call._deadline)
            for task in done:
                at, error = tasks.pop(task), task.exception()
                if error is not None:
                    yield await asyncio.to_thread(call._failed, at, error)
                elif at in call._answering:
                    yield Outcome(call._ranks[at], call._coords(at), task.result())
    finally:
        await _dropped(set(tasks))


async def _dropped(tasks: set[asyncio.Task[Any]]) -> None:
    """Nobody waits for these any more; what they wait for goes on."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _value_of(call: Call, at: int) -> Any:
    """What a worker answers: its value, or the list of its items."""
    future = call.futures[at]
    if isinstance(future, ObjectRefGenerator):
        items = call._items.setdefault(at, [])
        async for ref in future:
            items.append(ref)
        await asyncio.wrap_future(future.completed().future())
        values = [await asyncio.wrap_future(ref.future()) for ref in items]
        call._check_complete(at)
        call._count_once([at], items)
        return values
    value = await asyncio.wrap_future(future.future())
    if at in call._answering:
        call._count_once([at], [future])
    return value
