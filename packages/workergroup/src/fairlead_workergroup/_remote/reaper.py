# SPDX-License-Identifier: Apache-2.0
"""A small process beside each worker, which ends the worker and its tree even if the driver and Ray have been killed.

It also enforces the limit of the worker's memory, and leaves its verdict in a file."""

import contextlib
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence

from .._ray_private import session_folder
from .process import VARIABLE, reap, start_tick

# Without a limit it sleeps in `poll`, and loads the code that ends trees afterwards, because that takes memory.
WAIT = """\
import select, sys
worker, raylet, program, pid, started, limit = map(int, sys.argv[1:7])
poll = select.poll()
poll.register(worker)
poll.register(raylet)
if not limit:
    poll.poll()
exec(open(program).read())
reap((pid, started), sys.argv[7], lambda within_s: bool(poll.poll(1000 * within_s)), limit, sys.argv[8])
"""
PROGRAM = inspect.getsource(sys.modules[reap.__module__])


def start_reaper(identity: str, limit: int = 0, verdict: str = "") -> None:
    """Start the reaper of this process as a child of init, because Ray kills the children of a worker that ends.

    Args:
        identity: the mark of the worker's tree.
        limit: the bytes of memory that the worker may hold with its descendants; 0 for any number.
        verdict: the file for the verdict, with a limit.

    Raises:
        OSError: the reaper cannot be started, and there is a limit.
    """
    pid, program = os.getpid(), os.memfd_create("fairlead-reaper")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, program)
        os.write(program, PROGRAM.encode())
        os.lseek(program, 0, os.SEEK_SET)
        try:
            worker = os.pidfd_open(pid)  # no fork of the worker can hold back its end, as it could with a pipe
            stack.callback(os.close, worker)
            # Ray takes a raylet that was killed for alive until its parent, such as the driver, has waited for it.
            raylet = os.pidfd_open(int(os.environ.get("RAY_RAYLET_PID", pid)))
            stack.callback(os.close, raylet)
            about = map(str, (worker, raylet, program, pid, start_tick(pid), limit, identity, verdict))
            shell = subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-I", "-S", "-c", WAIT, *about],
                pass_fds=(worker, raylet, program),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name != VARIABLE.decode()},
                start_new_session=True,
            )
            if shell.returncode:
                raise ChildProcessError("The shell could not fork: there may be too many processes.")
        except OSError as error:
            if limit:
                raise OSError(
                    f"memory_limit cannot be enforced: the worker's reaper does not start. {error}"
                ) from error
            warnings.warn(f"No reaper: what this worker starts may outlive a killed driver. {error}", stacklevel=2)


def read_verdicts(actor_ids: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return the bytes that each worker of this node held and its limit, if its reaper has ended it for that."""
    return [read_verdict(verdict_of(actor_id)) for actor_id in actor_ids]


def read_verdict(path: str) -> tuple[int, int] | None:
    """Return both numbers of a verdict; None if there is none."""
    try:
        with open(path) as file:
            used, limit = file.read().split()
    except FileNotFoundError:
        return None
    return int(used), int(limit)


def verdict_of(actor_id: str) -> str:
    """Return the path of the verdict on a worker of this node."""
    return f"{session_folder()}/fairlead-memory-{actor_id}"
