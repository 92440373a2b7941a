# SPDX-License-Identifier: Apache-2.0
"""Releases what an object holds when the program drops it without closing it.

The garbage collector runs on any thread, at any moment, also while that thread holds locks. So its callback only puts
the object's resources in a queue. A background thread releases them.
"""

import logging
import queue
import threading
import warnings
import weakref
from collections.abc import Callable

from .._nodes.rounds import Rounds, start_monitor
from .._ray_private import block_shutdown, connection

logger = logging.getLogger(__name__)

# What returns the warning, and what releases.
_Dropped = tuple[Callable[[], str], Callable[[], object]]
# Python guarantees only for this class that a callback of the garbage collector may call `put` at any moment.
_queue: queue.SimpleQueue[_Dropped | threading.Event] = queue.SimpleQueue()


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
    start_monitor()  # which the callback must not do
    weakref.finalize(owner, _put, (leak, release)).atexit = False


def wait_for_dropped(timeout_s: float) -> bool:
    """Wait until everything that has been dropped so far is returned, and return whether that was in time."""
    if _rounds.is_here():
        return True
    returned = threading.Event()
    _queue.put(returned)
    _rounds.start()
    return _rounds.closed or returned.wait(timeout_s)


def _put(dropped: _Dropped) -> None:
    _queue.put(dropped)
    _rounds.note()


def _return_all() -> None:
    while not (_rounds.closed or _queue.empty()):
        # A list, so that the resources are freed here and not with a frame.
        one = [_queue.get()]
        if isinstance(one[0], threading.Event):
            one[0].set()
        else:
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
        if connection() is ray_before and not _rounds.closed:
            logger.warning("Returning what a dropped object held failed: %s: %s", type(error).__name__, error)


_rounds = Rounds(0.0, _return_all, lambda: not _queue.empty(), exit_s=2.0)
