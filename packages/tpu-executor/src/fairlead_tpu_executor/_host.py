# SPDX-License-Identifier: Apache-2.0
"""What runs on a host, in a fresh process: its environment first, then the user's function.

Shipped by value, so that hosts need nothing but Ray: this module imports the standard library, Ray, and
`_ray_private`, which is shipped by value too.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from ._ray_private import process_is_fresh

__all__ = ["HostActor", "are_over", "call", "call_method", "call_raw", "clear_lock_file", "describe_port"]

logger = logging.getLogger(__name__)
_PREDECESSOR_S = 30.0
_mine: list[socket.socket] = []


def call(facts: dict[str, Any], payload: list[Any]) -> tuple[bool, Any]:
    """(True, what the function returns), or (False, None) in a process in which something else ran before.

    Ray hands a task to an idle process of the job if there is one. An accelerator that was opened in it, or a module
    that was imported, cannot be undone; this task ends the process, and its successor gets another one.
    """
    if not facts["dedicated"] and not process_is_fresh():
        return False, None
    return True, call_raw(facts, payload)


def call_raw(facts: dict[str, Any], payload: list[Any]) -> Any:
    """What the function returns. The payload is a reference in a list, so that it is unpickled only here."""
    _enter(facts)
    function, args, kwargs = _resolved(payload)
    return function(*args, **kwargs)


class HostActor:
    """Holds an instance of the user's class on a host, for as long as it is wanted."""

    def __init__(self, facts: dict[str, Any], payload: list[Any]) -> None:
        self._facts, self._payload = facts, payload
        self._instance: Any = None
        self._made = False
        # With max_concurrency the first calls may come at the same time.
        self._making = threading.Lock()

    def invoke(self, method: str, payload: list[Any]) -> Any:
        """Call a method of it. It is made on the first call, so that what its constructor raises keeps its type."""
        with self._making:
            if not self._made:
                _enter(self._facts)
                cls, args, kwargs = _resolved(self._payload)
                self._instance, self._made = cls(*args, **kwargs), True
        _, args, kwargs = _resolved(payload)
        return getattr(self._instance, method)(*args, **kwargs)


def _resolved(payload: list[Any]) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """The function and its arguments; references among these are replaced by values, as Ray does for a task."""
    function, args, kwargs = ray.get(payload[0])
    refs = [value for value in (*args, *kwargs.values()) if isinstance(value, ray.ObjectRef)]
    values = dict(zip(refs, ray.get(refs), strict=True))
    return (
        function,
        [values[value] if isinstance(value, ray.ObjectRef) else value for value in args],
        {name: values[value] if isinstance(value, ray.ObjectRef) else value for name, value in kwargs.items()},
    )


def _enter(facts: dict[str, Any]) -> None:
    """Wait for the process before this one, clear what the dead left, set the environment."""
    held = _wait_for_predecessor(facts["name"])
    if held is not None:
        _mine.append(held)
    for path in facts["lock_files"]:
        said = clear_lock_file(path)
        if said:
            logger.warning("%s", said)
    zone = os.environ.get("TPU_ZONE") or facts["zone"]
    for name, value in facts["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if zone:
        os.environ["TPU_ZONE"] = zone


def _address(name: str) -> str:
    """An abstract socket: no file, and the kernel closes it with the process, however that ends."""
    return f"\0fairlead-tpu-{name}"


def _try_to_hold(name: str) -> socket.socket | None:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(_address(name))
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held


def _wait_for_predecessor(name: str) -> socket.socket | None:
    """Ray takes a bundle's resources to be free a moment before the process that had them is gone."""
    deadline = time.monotonic() + _PREDECESSOR_S
    while (held := _try_to_hold(name)) is None:
        if time.monotonic() >= deadline:
            logger.warning("what ran on this host before has not ended within %g s", _PREDECESSOR_S)
            return None
        time.sleep(0.02)
    return held


def are_over(names: list[str], timeout_s: float) -> bool:
    """For a node's agent: whether what runs in some bundles is gone, waiting for it if need be."""
    deadline = time.monotonic() + timeout_s
    for name in names:
        while (held := _try_to_hold(name)) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        held.close()
    return True


def clear_lock_file(path: str) -> str:
    """Remove a lock file that nothing alive holds; what there is to say if it stays.

    Nobody is signalled. Whether it is held is asked of the kernel, which knows the locks of all processes, and of the
    open files of those that can be looked at.
    """
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return ""
    if not stat.S_ISREG(there.st_mode):
        return f"{path} is no plain file, and stays"
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"{path} belongs to somebody else, and stays: {error.strerror}"
    try:
        # Both kinds of locks: libtpu's is one, tools' may be the other. They are let go with the file.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.fstat(file)
        users = _who_has_open(there.st_dev, there.st_ino)
        if users:
            return f"{path} is open in process(es) {', '.join(map(str, users))}, and stays"
        os.unlink(path)
    except BlockingIOError:
        there = os.fstat(file)
        users = _who_has_open(there.st_dev, there.st_ino)
        by = f"process(es) {', '.join(map(str, users))}" if users else "a process that cannot be seen from here"
        return f"{path} is locked by {by}, and stays. If an accelerator does not start, it is in use there."
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror}"
    finally:
        os.close(file)
    return ""


def _who_has_open(device: int, inode: int) -> list[int]:
    """Other processes that have a file open, as far as this one may look."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        # It may end meanwhile, or be somebody else's.
        with contextlib.suppress(OSError):
            for one in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    there = os.stat(one.path)
                    if (there.st_dev, there.st_ino) == (device, inode):
                        found.append(pid)
                        break
    return sorted(found)


def describe_port(port: int) -> str:
    """For a node's agent: which process listens on a port, or has it bound."""
    import psutil  # Ray brings it

    for one in psutil.net_connections(kind="tcp"):
        if one.laddr and one.laddr.port == port and one.pid:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(one.pid)
                return f"process {one.pid} ({' '.join(process.cmdline())[:200] or process.name()})"
    return "a process that cannot be seen from here"


def call_method(
    cls: Callable[..., Any],
    init_args: tuple[Any, ...],
    init_kwargs: dict[str, Any],
    method: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Make an instance and call a method of it."""
    return getattr(cls(*init_args, **init_kwargs), method)(*args, **kwargs)
