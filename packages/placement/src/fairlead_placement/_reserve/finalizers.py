# SPDX-License-Identifier: Apache-2.0
"""Releases what an object holds when the program drops the object without closing it.

The garbage collector runs on any thread, at any moment, also while that thread holds locks. So its callback only hands
the object's resources to a background thread, which releases them.
"""

import atexit
import logging
import threading
import warnings
import weakref
from collections.abc import Callable

from .._nodes.background import run_in_thread
from .._ray_private import block_shutdown, connection

logger = logging.getLogger(__name__)
_turn = threading.Lock()  # only the thread that has it returns something


def release_when_dropped(owner: object, leak: Callable[[], str], release: Callable[[], object]) -> None:
    """Have a background thread release what an object holds when the program drops the object.

    The thread emits a ResourceWarning first. Nothing is done at interpreter exit: Ray releases what a driver holds.

    Args:
        owner: the object. Neither function may refer to it.
        leak: returns the text of the warning, or "" if nothing is held.
        release: releases what is held. It is called in either case, also if the program has called it already.
    """
    functions = [leak, release]
    weakref.finalize(owner, run_in_thread, _return, functions, name="fairlead-finalizers").atexit = False


def _return(functions: list[Callable[[], object]]) -> None:
    with _turn:
        _release(*functions)
        with block_shutdown():
            functions.clear()  # so that the resources are freed here


def _release(leak: Callable[[], object], give_back: Callable[[], object]) -> None:
    ray_before = connection()
    try:
        try:
            if message := leak():
                warnings.warn(str(message), ResourceWarning, stacklevel=2)
        finally:  # also where warnings are errors
            give_back()
    except BaseException as error:  # noqa: BLE001  whatever a release raises: nobody waits for it
        if connection() is ray_before:
            logger.warning("Returning what a dropped object held failed: %s: %s", type(error).__name__, error)


# After Ray's own hook, so that it runs before it: no release begins any more, and one that is under way has a moment.
atexit.register(_turn.acquire, timeout=2.0)
