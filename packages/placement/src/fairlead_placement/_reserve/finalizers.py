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

# What returns the warning, and what releases.
_Dropped = tuple[Callable[[], str], Callable[[], object]]
# Python guarantees only for this class that a callback of the garbage collector may call `put` at any moment.
_queue: queue.SimpleQueue[_Dropped | threading.Event] = queue.SimpleQueue()
_exiting = threading.Event()
# By process: a fork has none at first.
_threads: dict[int, threading.Thread] = {}


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
    # A callback of the garbage collector must not start the thread.
    thread = _threads.setdefault(os.getpid(), threading.Thread(target=_run, name="fairlead-dropped", daemon=True))
    if thread.ident is None and not _exiting.is_set():
        with contextlib.suppress(RuntimeError):  # another caller has started it
            thread.start()
            # After Ray's own hook, so that it runs before it.
            atexit.register(_stop)
    weakref.finalize(owner, _queue.put, (leak, release)).atexit = False


def wait_for_dropped(timeout_s: float) -> bool:
    """Wait until everything that has been dropped so far is returned, and return whether that was in time."""
    thread = _threads.get(os.getpid())
    if thread is None or not thread.is_alive() or thread is threading.current_thread():
        return True
    returned = threading.Event()
    _queue.put(returned)
    return returned.wait(timeout_s)


def _run() -> None:
    never_connect()
    is_serving = True
    while is_serving:
        # A list, so that the thread does not keep its resources alive while it waits for the next one here.
        one = [_queue.get()]
        is_serving = not _exiting.is_set()
        if isinstance(one[0], threading.Event):
            one[0].set()
        elif is_serving:
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
        if connection() is ray_before and not _exiting.is_set():
            logger.warning("Returning what a dropped object held failed: %s: %s", type(error).__name__, error)


def _stop() -> None:
    """Return nothing more, and wait a moment for what is under way."""
    _exiting.set()
    _queue.put(threading.Event())  # which wakes the thread
    if (thread := _threads.get(os.getpid())) is not None:
        thread.join(2.0)
