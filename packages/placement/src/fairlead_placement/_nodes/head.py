# SPDX-License-Identifier: Apache-2.0
"""Sends requests to Ray's head (its GCS) with a deadline.

Ray itself waits without a limit for a head that hangs, and its waits cannot be interrupted. So each request runs on a
thread of its own, which may outlive the call.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import ray

from .._ray_private import never_connect
from ..exceptions import HeadTimeoutError

_T = TypeVar("_T")
# The limit of methods that have none of their own.
HEAD_S = 30.0
# A request gets this long even after the deadline: a reservation that takes only what is free now (0 s) makes some too.
LEAST_S = 5.0
_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("fairlead_head_deadline")


@contextlib.contextmanager
def head_deadline(timeout_s: float | None = None) -> Iterator[None]:
    """Give all requests to the head that this thread makes in a block one deadline. The earliest of nested ones counts.

    Args:
        timeout_s: seconds from now; None for `HEAD_S`. A single request always gets at least `LEAST_S`.
    """
    until = time.monotonic() + (HEAD_S if timeout_s is None else timeout_s)
    token = _deadline.set(min(until, _deadline.get(until)))
    try:
        yield
    finally:
        _deadline.reset(token)


def ask_head(
    request: str,
    function: Callable[..., _T],
    *args: Any,
    timeout_s: float | None = None,
    undo: Callable[[_T], object] | None = None,
) -> _T:
    """Call a function that sends requests to Ray's head, and return what it returns.

    Args:
        request: names the request in the error, as a verb with its object.
        function: the function.
        args: its arguments.
        timeout_s: seconds to wait; None for what is left of `head_deadline`. Outside of it there is no limit, and the
            function runs on this thread.
        undo: reverts what the function did if it returns after this call has ended.

    Raises:
        HeadTimeoutError: the head did not answer in time. The function continues in the background.
        Exception: any exception of the function.
    """
    until = _deadline.get(None)
    if timeout_s is None and until is not None:
        timeout_s = max(LEAST_S, until - time.monotonic())
    # Ray connects to a cluster on the main thread only.
    if timeout_s is None or not ray.is_initialized():
        return function(*args)
    began = time.monotonic()
    try:
        return call_within(timeout_s, function, *args, undo=undo)
    except ray.exceptions.RayTaskError:
        raise  # of a task, not of the head
    except (TimeoutError, ray.exceptions.RpcError) as error:
        raise HeadTimeoutError(
            f"Ray's head (GCS) did not answer a request to {request}; waited {time.monotonic() - began:.1f} s. Its "
            "process (gcs_server) may be stopped, overloaded or unreachable: look at the head node and the network to "
            "it, and try again."
        ) from error


def call_within(
    timeout_s: float, function: Callable[..., _T], *args: Any, undo: Callable[[_T], object] | None = None
) -> _T:
    """Call a function on a thread of its own that never starts a Ray, and return what it returns.

    Args:
        timeout_s: seconds to wait.
        function: the function.
        args: its arguments.
        undo: reverts what the function did if it returns after this call has ended.

    Raises:
        TimeoutError: the function did not return in time. It continues, and the thread ends with it.
        Exception: any exception of the function.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        never_connect()
        try:
            value = function(*args)
        except BaseException as error:  # noqa: BLE001  raised below, unless nobody waits any more
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            return
        if answer.set_running_or_notify_cancel():
            answer.set_result(value)
        elif undo is not None:
            undo(value)

    thread = threading.Thread(target=run, name="fairlead-head", daemon=True)
    until = time.monotonic() + timeout_s
    try:
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no threads any more
            run()
        wait([answer], timeout_s)
        if answer.done() and thread.is_alive():
            thread.join()  # Ray must not be shut down while the thread drops its references
    except BaseException:  # an interrupt
        if undo is not None:  # what was begun is finished first, if that happens in time
            wait([answer], until - time.monotonic())
        if not answer.cancel() and undo is not None and answer.exception() is None:
            undo(answer.result())
        raise
    if answer.cancel():
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return answer.result()
