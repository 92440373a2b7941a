# SPDX-License-Identifier: Apache-2.0
"""The code that runs on a host, in a new process: it sets the environment, then calls the user's function.

This module is shipped by value, so that hosts need nothing but Ray. It imports the standard library, Ray, and
`_ray_private`, which is also shipped by value.
"""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from ._ray_private import process_is_fresh

# What a task returns if something else ran in its process before. The caller starts it again in a process of its own.
USED_PROCESS = "fairlead: another task ran in this process"
LOCK_S = 60.0
# `struct flock` of Linux: the type and the origin, the start and the length, the process.
_FLOCK = "hhqqi4x"


def call(facts: dict[str, Any], payload: list[Any]) -> Any:
    """Return the function's result. The payload is a reference in a list, so that it is unpickled only here."""
    if not facts.get("is_own_process") and not process_is_fresh():
        return USED_PROCESS
    for path in facts["lock_files"]:
        wait_for_lock(path, LOCK_S)
    zone = os.environ.get("TPU_ZONE") or facts["zone"]
    for name, value in {**facts["env"], **({"TPU_ZONE": zone} if zone else {})}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    function, args, kwargs = _resolve(payload)
    return function(*args, **kwargs)


class HostActor:
    """Holds an instance of the user's class on a host."""

    def __init__(self, facts: dict[str, Any], payload: list[Any]) -> None:
        self._failure: Exception | None = None
        try:
            self._instance = call(facts, payload)
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


def wait_for_lock(path: str, timeout_s: float) -> None:
    """Wait until no other process has locked a file, as libtpu does while it has the chips.

    Ray frees the resources of the previous process on the host before that process is gone. The file is neither locked
    nor removed here: libtpu does both, and two processes that lock different files of one name would share the chips.

    Raises:
        RuntimeError: the file was locked all the time. The message names the process.
    """
    deadline = time.monotonic() + timeout_s
    while owner := lock_owner(path):
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"The TPU is already in use: {owner} has locked {path} for {timeout_s:g} s. End that process, or use "
                "another slice."
            )
        time.sleep(0.05)


def lock_owner(path: str) -> str:
    """Return which process has locked a file by `lockf`, as libtpu does, or "" if none has."""
    try:
        # Not through a link that another user may have put there.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        kind, *_, pid = struct.unpack(
            _FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        )
    except OSError:
        return ""
    finally:
        os.close(file)
    if kind == fcntl.F_UNLCK:
        return ""
    command = ""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:100]
    return f"process {pid} ({command or 'of another container'})"


def call_method(
    cls: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], method: str, /, *more: Any, **named: Any
) -> Any:
    return getattr(cls(*args, **kwargs), method)(*more, **named)
