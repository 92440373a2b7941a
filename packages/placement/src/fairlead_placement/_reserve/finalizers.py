# SPDX-License-Identifier: Apache-2.0
"""Releases what an object holds when the program drops the object without closing it.

The garbage collector runs on any thread, at any moment, also while that thread holds locks. So its callback only hands
the object's resources to a background thread, which releases them.
"""

import atexit
import collections
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from .._nodes.background import run_in_thread
from .._nodes.head import wait_until
from .._ray_private import block_shutdown, connection

logger = logging.getLogger(__name__)
# How long the exit of the interpreter waits for a release that is under way.
EXIT_S = 2.0
# The functions of what has been dropped and is not returned yet, in the order of the drops.
_dropped: collections.deque[list[Callable[[], Any]]] = collections.deque()
_turn = threading.Lock()  # only the thread that has it returns something


def release_when_dropped(owner: object, leak: Callable[[], str], release: Callable[[], object]) -> None:
    """Have a background thread release what an object holds when the program drops the object.

    The thread emits a ResourceWarning first. Nothing is done at interpreter exit: Ray releases what a driver holds.

    Args:
        owner: the object. Neither function may refer to it.
        leak: returns the text of the warning, or "" if nothing is held.
        release: releases what is held. It is called in either case, also if the program has called it already.
    """
    weakref.finalize(owner, _drop, [leak, release]).atexit = False


def wait_for_dropped(timeout_s: float) -> bool:
    """Wait until everything that has been dropped so far is returned, and return whether that was in time."""
    if not (last := [*_dropped]):
        return True
    return wait_until(lambda: not last[-1], time.monotonic() + timeout_s)


def _drop(functions: list[Callable[[], Any]]) -> None:
    _dropped.append(functions)
    run_in_thread(_return_first, name="fairlead-finalizers")


def _return_first() -> None:
    """Return what was dropped first of all that is not returned yet. No two threads do so at once."""
    with _turn:
        _release(*_dropped[0])
        with block_shutdown():
            _dropped.popleft().clear()  # so that the resources are freed here


def _release(leak: Callable[[], str], give_back: Callable[[], object]) -> None:
    ray_before = connection()
    try:
        try:
            if message := leak():
                warnings.warn(message, ResourceWarning, stacklevel=2)
        finally:  # also where warnings are errors
            give_back()
    except BaseException as error:  # noqa: BLE001  whatever a release raises: nobody waits for it
        if connection() is ray_before:
            logger.warning("Returning what a dropped object held failed: %s: %s", type(error).__name__, error)


# A fork holds nothing of what its parent has dropped.
os.register_at_fork(after_in_child=_dropped.clear)
# After Ray's own hook, so that it runs before it: no release begins any more, and one that is under way has a moment.
atexit.register(_turn.acquire, timeout=EXIT_S)
