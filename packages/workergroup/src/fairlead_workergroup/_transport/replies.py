# SPDX-License-Identifier: Apache-2.0
"""The requests of calls to Ray, and the replies that come back: the only module that sends calls and waits for them.

A reply is an `ObjectRef`, or the generator of them that a method returns which yields.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from .. import _world
from .._ray_private import TASK_BYTES, actor_id_of_ref, end_of, on_ready
from .._world import NEVER, Deadline
from ..exceptions import WorkerGroupError


class Request(NamedTuple):
    """The request to one worker: a method of its host, the arguments, and the back-pressure its host does not know."""

    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    backpressure: int | None = None


class NotYet(Exception):
    """A reply has not come in time."""


# Raises or logs a delay, and returns the deadline of the rest of a wait.
CheckLate = Callable[[Deadline], Deadline]
# The interval at which a wait logs the ranks that it waits for.
REPORT_EVERY_S = 60.0
# Packages whose frames say nothing about the user's error.
INTERNAL = frozenset({"asyncio", "concurrent", "fairlead_placement", "fairlead_workergroup", "ray"})


def submit(handles: Iterable[Any], requests: Iterable[Request]) -> list[Any]:
    """Send a request to each worker, in order; return the replies without waiting for them.

    Once it has begun, it runs to its end: a Ctrl-C inside is raised when all workers have their request.
    """
    replies: list[Any] = []
    interrupted: KeyboardInterrupt | None = None
    for handle, request in zip(handles, requests, strict=True):
        method = getattr(handle, request.method)
        if request.backpressure is not None:
            method = method.options(_generator_backpressure_num_objects=request.backpressure)
        try:
            replies.append(method.remote(*request.args, **request.kwargs))
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return replies


def task_of(reply: Any) -> bytes:
    """Return the id of the task that makes a reply."""
    task: bytes = end_of(reply).binary()[:TASK_BYTES]
    return task


def actor_of(reply: Any) -> str:
    """Return the id of the actor that makes a reply."""
    return actor_id_of_ref(end_of(reply))


def values(refs: Sequence[Any], deadline: Deadline = NEVER, check_late: CheckLate | None = None) -> list[Any]:
    """Return the values of references; the first error ends the wait.

    `check_late` is called with the deadline when it has passed, and every `REPORT_EVERY_S` seconds. The transfer of
    values to this process does not count against the deadline.

    Raises:
        NotYet: one has not come by the deadline, and there is no `check_late`.
    """
    while refs:  # `ray.get` would start a Ray even for none
        left_s = deadline.left(at_most=None if check_late is None else REPORT_EVERY_S)
        try:
            return _world.current.get(list(refs), timeout=left_s)
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError):  # that of a worker
                raise
            if check_late is None:
                raise NotYet from None
        deadline = check_late(deadline)
    return []


def wait(refs: Sequence[Any], seconds: float | None = 0.0, *, first: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the references that are ready and the others, once all are, or with `first` one; or after some seconds."""
    if not refs:
        return [], []
    return _world.current.wait(refs, num_returns=1 if first else len(refs), timeout=seconds, fetch_local=False)


def error_of(ref: Any, seconds: float = 0.0) -> BaseException | None:
    """Return the error of a reference; None if it has a value, or one that does not come in some seconds."""
    try:
        values([ref], Deadline.after(seconds))
    except NotYet:
        return None
    except RayError as error:  # every exception of a worker
        failure: BaseException = error
        return failure.with_traceback(None)
    return None


def ignore(refs: Sequence[ObjectRef[Any]]) -> None:
    """Keep Ray from logging the errors that the replies of a failed call may still bring as unhandled ones."""

    def hold(ref: ObjectRef[Any], value: Any) -> None:
        """Keep the reference until the reply has come: Ray logs an error that comes when there is none."""

    for ref in wait(refs)[1]:
        on_ready(ref, partial(hold, ref))


def watch(refs: Sequence[ObjectRef[Any]], wake: Callable[[], object]) -> None:
    """Call a function when all references are ready, or one has an error: once or more, on a thread of Ray.

    Ray unpickles each value for that, in its own thread.
    """
    missing = list(range(len(refs)))  # `pop` is atomic

    def note(value: Any) -> None:
        missing.pop()
        if not missing or isinstance(value, RayError):
            wake()

    for ref in refs:
        on_ready(ref, note)


class short_traceback(contextlib.AbstractContextManager[None]):
    """Drop the frames of Fairlead and Ray from the tracebacks of errors that Fairlead raises on purpose.

    The frame with the `with` statement stays, and so do frames of the user's code below it. Other errors, which may be
    a defect of Fairlead, keep all frames.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if traceback is None or error is None:
            return
        if not isinstance(error, (WorkerGroupError, RayError)) and not isinstance(error.__cause__, RayError):
            return
        while isinstance(error.__context__, (RayError, NotYet)) and error.__cause__ is None:
            error.__context__ = error.__context__.__context__
        kept, frame = [traceback], traceback.tb_next
        while frame is not None:
            if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in INTERNAL:
                kept.append(frame)
            frame = frame.tb_next
        for above, below in zip(kept, [*kept[1:], None], strict=True):
            above.tb_next = below
        error.__traceback__ = kept[0]
