# SPDX-License-Identifier: Apache-2.0
"""Tests of a lane's end in a worker whose async methods overlap, with a connection that is a list of messages."""

import asyncio
import contextvars
import os
import pickle
import threading
import time
from collections import deque

import numpy as np
import pytest
import ray

from fairlead_lane._worker import overlap
from fairlead_lane._worker.serve import BEGUN, CALL, CANCEL, END, ERROR, ITEM, STOP, VALUE, make_answer
from fairlead_workergroup._remote.progress import OverlappingRecord, cancel_tasks
from fairlead_workergroup.spi import start_tick

TASKS = [bytes([number]) * 24 for number in range(1, 6)]


class Connection:
    """A connection whose messages are a list, in which an event holds up those behind it until it is set."""

    unacknowledged, has_message, is_welcome = 0, False, True

    def __init__(self, *messages: tuple | asyncio.Event) -> None:
        self.messages = deque(messages)
        self.answers: list[tuple[int, int, object]] = []
        self.ended = False
        # How many answers there were when the worker said that all calls had begun.
        self.begun: int | None = None
        self.readable = os.eventfd(1)
        self.deadline = time.monotonic() + 20

    def files(self) -> list[int]:
        return [self.readable]

    def look(self, *, waits: bool = False) -> bool:
        assert time.monotonic() < self.deadline, f"a call has not been answered, and these have: {self.answers}"
        return False

    def take(self) -> tuple | None:
        if self.messages and isinstance(self.messages[0], asyncio.Event) and self.messages[0].is_set():
            self.messages.popleft()
        waits = not self.messages or isinstance(self.messages[0], asyncio.Event)
        return None if waits else self.messages.popleft()

    def send(self, kind: int, form: int, call: int, frames=()) -> None:
        if kind == BEGUN:
            self.begun = len(self.answers)
            return
        self.answers.append((kind, call, pickle.loads(frames[0], buffers=frames[1:]) if frames else None))

    def say_goodbye(self) -> None:
        self.ended = True

    def close(self) -> None:
        os.close(self.readable)


def make_call(number: int, method: str, *args) -> tuple:
    return CALL, number, TASKS[number], [pickle.dumps((method, list(args), {}))]


def make_cancel(number: int) -> tuple:
    return CANCEL, 0, TASKS[number], []


@pytest.fixture
def stored():
    """Return the list of what Ray stores."""
    return []


@pytest.fixture
def serve(monkeypatch, stored):
    """Return a function that serves messages with these methods, and returns the connection and what Ray stores."""

    def run(methods, *messages, name_task=lambda read: None, opened=lambda connection: None) -> tuple[Connection, list]:
        connection = Connection(*messages, (STOP, 0, b"", []))
        opened(connection)
        stored.clear()
        monkeypatch.setattr(overlap, "Connection", lambda config, *, waits: connection)

        async def collect() -> None:
            async for answer in overlap.serve_overlapping(None, methods.__getitem__, name_task):
                stored.append(answer)

        asyncio.run(collect())
        assert connection.ended
        return connection, stored

    return run


async def echo(value):
    return value


async def items(count):
    for i in range(count):
        yield i


METHODS = {"echo": echo, "items": items}


class TestCalls:
    @pytest.mark.parametrize("count", [1, overlap.MOST_QUEUED - 1, overlap.MOST_QUEUED, 3 * overlap.MOST_QUEUED])
    def test_last_answer(self, serve, count):
        """The end of a generator is sent also if its lane ends meanwhile and the queue of answers is full."""
        connection, _ = serve(METHODS, make_call(1, "items", count))
        assert connection.answers == [*((ITEM, 1, i) for i in range(count)), (END, 1, None)]

    def test_code_after_a_stored_answer(self, serve, stored):
        """No code of the user begins or goes on, which could block the loop, before Ray has the earlier answers."""
        before = []

        def make():
            before.append(len(stored))
            return np.ones(50_000)

        async def make_items():
            for _ in range(3):
                yield make()

        serve({"make": make, "make_items": make_items}, make_call(1, "make"), make_call(2, "make_items"))
        assert before == [0, 1, 2, 3]

    def test_order(self, serve, monkeypatch):
        """Calls begin in their order while an argument is fetched, which blocks no coroutine that runs."""
        arrived, begun, during = [], [], []

        class Reference:
            def __await__(self):
                yield from asyncio.sleep(0.1).__await__()
                arrived.append(True)
                return "fetched"

        async def note(value):
            begun.append(value)

        async def watch():
            while not arrived:
                during.append(True)
                await asyncio.sleep(0.001)

        monkeypatch.setattr("fairlead_lane._worker.serve.borrow", lambda *source: Reference())
        fetching = (CALL, 2, TASKS[2], [pickle.dumps(("note", [None], {})), pickle.dumps([(0, (b"", b"", b""))])])
        calls = [make_call(1, "watch"), fetching, make_call(3, "note", "next")]
        connection, _ = serve({"note": note, "watch": watch}, *calls)
        assert begun == ["fetched", "next"]
        assert len(during) > 1
        assert sorted(call for _, call, _ in connection.answers) == [1, 2, 3]

    def test_answer_with_a_reference_that_does_not_pickle(self, serve):
        """An answer that Ray could not store either is an error of its call, and later calls are answered."""
        reference = ray.ObjectRef(os.urandom(28))

        async def make():
            return [reference, threading.Lock()]

        connection, stored = serve({**METHODS, "make": make}, make_call(1, "make"), make_call(2, "echo", 5))
        assert stored == []
        assert [answer[:2] for answer in connection.answers] == [(ERROR, 1), (VALUE, 2)]

    @pytest.mark.parametrize("exit", [ray.exceptions.AsyncioActorExit, SystemExit])
    @pytest.mark.parametrize("kind", ["call", "items"])
    def test_exit(self, serve, exit, kind):
        """An exit that a method asks for ends the lane, and is not an answer of its call."""
        answers = []

        async def leave():
            raise exit

        def leave_with_items():
            yield 1
            raise exit

        with pytest.raises(exit):
            serve({"call": leave, "items": leave_with_items}, make_call(1, kind), opened=answers.append)
        assert answers[0].answers == [(ITEM, 1, 1)][: kind == "items"]

    def test_error_that_does_not_pickle(self, serve):
        """An error that cannot be pickled is reported by its text, and later calls are answered."""

        class UnwillingError(Exception):
            def __reduce__(self):
                raise ValueError("never")

        async def fail():
            raise UnwillingError("here")

        connection, _ = serve({**METHODS, "fail": fail}, make_call(1, "fail"), make_call(2, "echo", 5))
        (kind, call, error), after = connection.answers
        assert (kind, call, after) == (ERROR, 1, (VALUE, 2, 5))
        assert "UnwillingError: here" in str(error)

    def test_answer_that_is_changed_afterwards(self):
        """An answer that is sent again has the content that the method returned."""
        value = np.zeros(3)
        answer = make_answer(value)
        value[:] = 1
        assert pickle.loads(answer.frames[0], buffers=answer.frames[1:]).tolist() == [0, 0, 0]


class TestEnd:
    def test_calls_that_have_begun(self, serve):
        """The worker says that all calls have begun before they have ended."""
        connections = []

        async def last():
            while connections[0].begun is None:
                await asyncio.sleep(0.001)

        connection, _ = serve(
            {"last": last, "echo": echo}, make_call(1, "echo", 5), make_call(2, "last"), opened=connections.append
        )
        assert [answer[1] for answer in connection.answers] == [1, 2]
        assert connection.begun is not None


class TestCancel:
    def test_call_and_cancel_at_once(self, serve):
        """A call whose cancellation arrives with it does not run, and is answered."""
        ran = []

        async def note():
            ran.append(True)

        connection, _ = serve({"note": note}, make_call(1, "note"), make_cancel(1))
        ((kind, call, error),) = connection.answers
        assert (kind, call, ran) == (ERROR, 1, [])
        assert isinstance(error.cause, ray.exceptions.TaskCancelledError)

    def test_call_that_runs(self, serve):
        """A call that runs is cancelled, others go on."""

        sleeping = asyncio.Event()

        async def sleep():
            sleeping.set()
            await asyncio.sleep(600)

        calls = [make_call(1, "sleep"), make_call(2, "echo", 5), sleeping, make_cancel(1)]
        connection, _ = serve({**METHODS, "sleep": sleep}, *calls)
        assert [answer[:2] for answer in connection.answers] == [(VALUE, 2), (ERROR, 1)]

    def test_calls_by_ray(self, serve, monkeypatch):
        """A call that Ray runs while the lane is open is cancelled if it was cancelled itself, and not otherwise."""
        task_of_ray = contextvars.ContextVar("task_of_ray", default=b"")
        monkeypatch.setattr(OverlappingRecord, "_running_task", lambda record: task_of_ray.get())
        record = OverlappingRecord(["method"])

        async def run_by_ray(task):
            task_of_ray.set(task)
            record.end(record.begin(0))

        async def run_others():
            loop = asyncio.get_running_loop()
            others = [loop.create_task(run_by_ray(task), context=contextvars.Context()) for task in TASKS[2:4]]
            return [repr(error) for error in await asyncio.gather(*others, return_exceptions=True)]

        process = os.getpid(), start_tick(os.getpid())
        try:
            cancel_tasks([(process, TASKS[0]), (process, TASKS[3])])
            connection, _ = serve({"run_others": run_others}, make_call(1, "run_others"), name_task=record.name_task)
        finally:  # other tests look for the only record of this process
            os.close(record._file)
        assert connection.answers == [(VALUE, 1, ["None", "TaskCancelledError()"])]
