# SPDX-License-Identifier: Apache-2.0
"""The code that runs on a host, in a new process: it completes the environment, then calls the user's function.

This module is shipped by value, so that hosts need nothing but Ray. It imports the standard library and Ray only.
"""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

LOCK_S = 60.0
# `struct flock` of Linux: the type and the origin, the start and the length, the process.
_FLOCK = "hhqqi4x"


def call(facts: dict[str, Any], payload: list[Any]) -> Any:
    """Return the function's result. The payload is a reference in a list, so that it is unpickled only here."""
    for path in facts["lock_files"]:
        wait_for_lock(path, LOCK_S)
    for name in facts["unset"]:
        os.environ.pop(name, None)
    if facts["zone"]:
        os.environ["TPU_ZONE"] = os.environ.get("TPU_ZONE") or facts["zone"]
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
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        # Not through a link that another user may have put there.
        with open(path, "rb", opener=lambda *args: os.open(args[0], args[1] | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return ""
    if kind == fcntl.F_UNLCK:
        return ""
    command = ""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:100]
    return f"process {pid} ({command or 'of another container'})"
