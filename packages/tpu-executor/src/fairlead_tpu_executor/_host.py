# SPDX-License-Identifier: Apache-2.0
"""The code that runs on a host, in a new process: it sets the environment, then calls the user's function.

This module is shipped by value, so that hosts need nothing but Ray. It imports the standard library, Ray, and
`_ray_private`, which is also shipped by value.
"""

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable
from typing import Any

import ray

from ._ray_private import process_is_fresh, session_folder

logger = logging.getLogger(__name__)
_PREDECESSOR_S = 30.0
# The number of names for the folder of locks; other users may have taken some.
_FOLDERS = 10_000
# The lock files that hold this host until the process ends.
_held: list[int | None] = []


def call(facts: dict[str, Any], payload: list[Any]) -> tuple[bool, Any]:
    """Return (True, the function's result), or (False, None) in a process in which something else ran before."""
    if not process_is_fresh():
        return False, None
    return True, call_raw(facts, payload)


def call_raw(facts: dict[str, Any], payload: list[Any]) -> Any:
    """Return the function's result. The payload is a reference in a list, so that it is unpickled only here."""
    _prepare_process(facts)
    function, args, kwargs = _resolve(payload)
    return function(*args, **kwargs)


class HostActor:
    """Holds an instance of the user's class on a host."""

    def __init__(self, facts: dict[str, Any], payload: list[Any]) -> None:
        self._failure: Exception | None = None
        try:
            self._instance = call_raw(facts, payload)
        except Exception as error:  # noqa: BLE001 - calls raise it, because Ray would hide its type here
            self._failure = error

    def invoke(self, method: str, payload: list[Any]) -> Any:
        """Call a method, or raise the exception of the constructor."""
        if self._failure is not None:
            raise self._failure
        _, args, kwargs = _resolve(payload)
        return getattr(self._instance, method)(*args, **kwargs)


def _resolve(payload: list[Any]) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return the function and its arguments, with values in place of references, as Ray does for a task."""
    function, args, kwargs = ray.get(payload[0])
    given = [*args, *kwargs.values()]
    values = iter(ray.get([value for value in given if isinstance(value, ray.ObjectRef)]))
    given = [next(values) if isinstance(value, ray.ObjectRef) else value for value in given]
    return function, given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))


def _prepare_process(facts: dict[str, Any]) -> None:
    """Wait for the previous process, remove stale lock files, and set the environment."""
    # Ray frees the resources of the previous process before it is gone.
    _held.append(hold(facts["name"], _PREDECESSOR_S))
    if _held[-1] is None:
        logger.warning("The previous process on this host has not ended within %g s.", _PREDECESSOR_S)
    for path in facts["lock_files"]:
        if problem := clear_lock_file(path):
            logger.warning("%s", problem)
    zone = os.environ.get("TPU_ZONE") or facts["zone"]
    for name, value in {**facts["env"], **({"TPU_ZONE": zone} if zone else {})}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def hold(name: str, timeout_s: float) -> int | None:
    """Lock a name once its previous process and its forked children are gone, and return the file; None if too late."""
    deadline = time.monotonic() + timeout_s
    folder = _open_lock_folder()
    try:
        while (file := _try_lock(name, folder)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if file is not None:
            for other in set(os.listdir(folder)) - {name}:
                if (unlocked := _try_lock(other, folder)) is not None:
                    os.unlink(other, dir_fd=folder)
                    os.close(unlocked)
        return file
    finally:
        os.close(folder)


def wait_for_end(names: list[str], timeout_s: float) -> bool:
    """Return whether the processes with these names are gone in time. A node's agent calls it."""
    deadline = time.monotonic() + timeout_s
    for name in names:
        held = hold(name, deadline - time.monotonic())
        if held is None:
            return False
        os.close(held)
    return True


def _open_lock_folder() -> int:
    """Open the folder of locks, which only this user can enter; create it if necessary."""
    start = os.path.join(session_folder(), f"fairlead-tpu-{os.geteuid()}-")
    for number in range(_FOLDERS):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{start}{number}", 0o700)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            folder = os.open(f"{start}{number}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(folder)
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return folder
            os.close(folder)
    raise PermissionError(f"{start}* has {_FOLDERS} folders of other users, so no lock can be created. Remove them.")


def _try_lock(name: str, folder: int) -> int | None:
    """Lock a file, and return it; None if another process has locked it, or has just removed it."""
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), os.stat(name, dir_fd=folder)):
            return file
    os.close(file)
    return None


def clear_lock_file(path: str) -> str:
    """Remove a lock file that no living process holds; return why it stays, or "" if it does not."""
    try:
        present = os.stat(path, follow_symlinks=False)
    except OSError:
        return ""
    if not stat.S_ISREG(present.st_mode):
        return f"{path} stays: it is not a regular file."
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"{path} stays: it belongs to somebody else ({error.strerror})."
    try:
        # Both kinds of locks: libtpu uses one, tools may use the other. Closing the file releases them.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        return f"{path} stays: another process locked it. If an accelerator does not start, it is in use there."
    except OSError as error:
        return f"{path} stays: it cannot be removed ({error.strerror})."
    finally:
        os.close(file)
    return ""


def call_method(
    cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], method: str, /, *more: Any, **named: Any
) -> Any:
    return getattr(cls(*args, **kwargs), method)(*more, **named)
