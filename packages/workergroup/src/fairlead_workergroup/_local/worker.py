# SPDX-License-Identifier: Apache-2.0
"""A worker that is a thread: its queue, its host, its record, and the variables of its rank."""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

from ray.exceptions import RayError

from fairlead_placement.spi import never_connect

from .._context import worker_of_thread
from .._membership.model import WorkerProcess
from .._remote.describe import load
from .._remote.host import WorkerHost
from .._remote.progress import Record
from .._remote.references import dump_error
from .._start.worker_class import WorkerClass
from ..exceptions import LateWorker, WorkerGroupError

# The address of this process in errors.
ADDRESS = "127.0.0.1"
USE_LAUNCH = "A LocalGroup has no object store: use launch to test references."
# How often a constructor that waits for its turn looks whether the group has been closed.
LOOK_S = 0.05


class RankVariables:
    """The environment variables of one worker, which `os.environ` has while its constructor runs."""

    # It protects os.environ: one constructor of this process at a time has the variables of its rank.
    _turn = threading.Lock()

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._replaced: list[dict[str, str | None]] = []

    def set(self, is_over: Callable[[], bool]) -> None:
        """Wait for the turn of this worker, unless its group is over, and set its variables."""
        while not self._turn.acquire(timeout=LOOK_S):
            if is_over():
                raise WorkerGroupError("The group was closed before this constructor had its turn.")
        self._replaced.append({name: os.environ.get(name) for name in self._variables})
        os.environ.update(self._variables)

    def restore(self) -> None:
        """Restore what `set` has replaced, once, on any thread."""
        with contextlib.suppress(IndexError):
            for name, value in self._replaced.pop().items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._turn.release()


class _ThreadHost(WorkerHost):
    """A host in a thread. It neither prepares its process nor describes it."""

    def __init__(self) -> None:
        self._fairlead_record = Record(self._fairlead_methods)
        self._fairlead_record.name_task(lambda: bytes(24))

    def _fairlead_start(
        self, facts: dict[str, Any], target: list[Any], args: Any, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Create the instance, of which the thread has published the facts."""
        self._fairlead_key = self._fairlead_record.begin(0)
        self._fairlead_make(load(*target), args, kwargs)
        return {}

    def _fairlead_end(self) -> None:
        """Release what the process would release at its end."""
        if self._fairlead_own_loop is not None:
            close_loop(self._fairlead_own_loop)
        self._fairlead_record.close()


class LocalHandle:
    """The entry of a worker in the roster of a group, which has the handle of an actor there otherwise."""

    def __init__(self, actor_id: bytes) -> None:
        self._actor_id = actor_id

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"A worker of a LocalGroup is a thread, not an actor: call {name!r} through the group.")


class LocalWorker:
    """One worker."""

    def __init__(
        self, process: WorkerProcess, described: WorkerClass, facts: dict[str, Any], init_kwargs: Mapping[str, Any]
    ) -> None:
        self.actor_id: bytes = os.urandom(16)
        self.process = replace(process, pid=os.getpid(), actor_id=self.actor_id.hex())
        self.variables = RankVariables(facts["env"])
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the calls, and None after the last one
        self.thread: threading.Thread | None = None
        self.init_kwargs = init_kwargs  # of `configure_worker`
        self._facts = facts
        self._described = described

    def begin(self, run: Callable[[Any], object], is_over: Callable[[], bool]) -> None:
        """Start the thread, which calls a function with each call of the queue."""
        self._is_over = is_over
        self._host: Any = type(self._described.name, (self._described.host, _ThreadHost), {})()
        name = f"fairlead-local-{self.process.rank}"
        self.thread = threading.Thread(target=self._serve, args=(run,), name=name, daemon=True)
        self.thread.start()

    def _serve(self, run: Callable[[Any], object]) -> None:
        never_connect()
        worker_of_thread.set(SimpleNamespace(facts=self._facts, record=self._host._fairlead_record))
        try:
            while (call := self.queue.get()) is not None:
                run(call)
                del call  # so that its values do not stay alive until the next one
        finally:
            self._host._fairlead_end()

    def find(self, name: str) -> Callable[..., Any]:
        """Return the method of the host, or what makes the instance."""
        method: Callable[..., Any] = self._start if name == "__init__" else getattr(self._host, name)
        return method

    def _start(self, /, *args: Any, **kwargs: Any) -> Any:
        self.variables.set(self._is_over)
        try:
            return self._host._fairlead_start(self._facts, [self._described.target], args, kwargs)
        finally:
            self.variables.restore()

    def look(self) -> LateWorker:
        """Return what the worker is doing."""
        process, known = self.process, dict[str, Any]()
        with contextlib.suppress(ValueError, OSError):  # the thread has just ended
            known = self._host._fairlead_record.read()
        late = LateWorker(process.rank, dict(process.coords), process.node_id, process.pid)
        return replace(late, method=known.get("method"), running_s=known.get("running_s", 0.0))


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of an event loop, wait for them and for its threads, and close it."""

    async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    try:
        loop.run_until_complete(end(asyncio.all_tasks(loop)))
    finally:
        loop.close()


def pickle_error(name: str, error: BaseException) -> list[bytes]:
    """Return the frames of an exception of a method, in the form in which Ray reports it."""
    if isinstance(error, SystemExit):
        error = WorkerGroupError(
            f"{name!r} called sys.exit({error.code!r}), which ends the process of a worker. A LocalGroup has no such "
            "processes: use launch to test it."
        ).with_traceback(error.__traceback__)
    _, frames = dump_error(name, error, package=__package__, address=ADDRESS)
    plain = RayError(f"{error!r} holds ObjectRefs. {USE_LAUNCH}").with_traceback(error.__traceback__)
    return frames or pickle_error(name, plain)
