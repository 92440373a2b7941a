# SPDX-License-Identifier: Apache-2.0
"""Releases what an object holds when the program drops it without closing it.

The garbage collector runs on any thread, at any moment, also while that thread holds locks. So its callback only puts
the object's resources in a queue. A background thread releases them.
"""

import atexit
import contextlib
import logging
import os
import queue
import threading
import warnings
import weakref
from collections.abc import Callable

from .._ray_private import block_shutdown, connection, never_connect

logger = logging.getLogger(__name__)
# How long the exit of the interpreter waits for a release that is under way.
EXIT_S = 2.0
# What returns the warning, and what releases.
_Dropped = tuple[Callable[[], str], Callable[[], object]]
# Python guarantees only for this class that a callback of the garbage collector may call `put` at any moment.
_queue: queue.SimpleQueue[_Dropped | threading.Event] = queue.SimpleQueue()
_threads: dict[int, threading.Thread] = {}  # by process: a fork has none at first
_closed = threading.Event()


def release_when_dropped(owner: object, leak: Callable[[], str], release: Callable[[], object]) -> None:
    """Have a background thread release what an object holds when the program drops the object.

    The thread emits a ResourceWarning first. Nothing is done at interpreter exit: Ray releases what a driver holds,
    and the node agents release the ports of another process.

    Args:
        owner: the object. Neither function may refer to it.
        leak: returns the text of the warning, or "" if nothing is held.
        release: releases what is held, and may take its time. It is called in either case, also if the program has
            called it already.
    """
    _start()  # which the callback must not do
    weakref.finalize(owner, _queue.put, (leak, release)).atexit = False


def wait_for_dropped(timeout_s: float) -> bool:
    """Wait until everything that has been dropped so far is returned, and return whether that was in time."""
    if threading.current_thread() is _threads.get(os.getpid()):
        return True
    returned = threading.Event()
    _queue.put(returned)
    _start()
    return _closed.is_set() or returned.wait(timeout_s)


def _start() -> None:
    if os.getpid() not in _threads:
        thread = threading.Thread(target=_serve, name="fairlead-finalizers", daemon=True)
        if _threads.setdefault(os.getpid(), thread) is thread:
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                thread.start()


def _serve() -> None:
    never_connect()
    while True:
        # A list, so that the resources are freed here and not with a frame.
        one = [_queue.get()]
        if isinstance(one[0], threading.Event):
            one[0].set()
        elif not _closed.is_set():
            _return(*one[0])
        with block_shutdown():
            one.clear()


def _return(leak: Callable[[], str], give_back: Callable[[], object]) -> None:
    ray_before = connection()
    try:
        try:
            if message := leak():
                warnings.warn(message, ResourceWarning, stacklevel=2)
        finally:  # also where warnings are errors
            give_back()
    except BaseException as error:  # noqa: BLE001  whatever a release raises: the thread has to serve the others
        if connection() is ray_before and not _closed.is_set():
            logger.warning("Returning what a dropped object held failed: %s: %s", type(error).__name__, error)


def _stop() -> None:
    """Release nothing more, and wait a moment for a release that is under way."""
    _closed.set()
    if os.getpid() in _threads:
        returned = threading.Event()
        _queue.put(returned)
        returned.wait(EXIT_S)


# After Ray's own hook, so that it runs before it.
atexit.register(_stop)
