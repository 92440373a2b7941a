# SPDX-License-Identifier: Apache-2.0
"""A small process beside each worker, which ends the worker's tree even if the driver and Ray have been killed."""

import inspect
import os
import subprocess
import sys
import warnings

from .process import VARIABLE, end_orphans, start_tick

# How long a shutdown or a restart has to end the tree first.
GRACE_S = 3.0
# It sleeps in `poll`, and loads the code that ends trees when the worker has ended, because that takes memory.
WAIT = """\
import select, sys
worker, program = map(int, sys.argv[1:3])
poll = select.poll()
poll.register(worker)
poll.poll()
exec(open(program).read())
end_orphans((int(sys.argv[3]), int(sys.argv[4])), sys.argv[5], float(sys.argv[6]))
"""
PROGRAM = inspect.getsource(sys.modules[end_orphans.__module__])


def start_reaper(identity: str) -> None:
    """Start the reaper of this process as a child of init, because Ray kills the children of a worker that ends."""
    pid, program = os.getpid(), os.memfd_create("fairlead-reaper")
    os.write(program, PROGRAM.encode())
    os.lseek(program, 0, os.SEEK_SET)
    try:
        worker = os.pidfd_open(pid)  # no fork of the worker can hold back its end, as it could with a pipe
        about = map(str, (worker, program, pid, start_tick(pid), identity, GRACE_S))
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-I", "-S", "-c", WAIT, *about],
            pass_fds=(worker, program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != VARIABLE.decode()},
            start_new_session=True,
        )
        os.close(worker)
    except OSError as error:
        warnings.warn(f"No reaper: what this worker starts may outlive a killed driver. {error}", stacklevel=2)
    finally:
        os.close(program)
