# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: those that a test starts below a worker, and those that remain of workers' trees."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from fairlead_workergroup._remote.process import read_marks, read_processes

# Starts a process whose pid is in a file.
CODE = """
import os, signal, sys
{more}
with open({path!r} + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename({path!r} + ".new", {path!r})
signal.pause()
"""
KINDS = ["cleared", "daemon", "fork", "session", "stubborn"]


def run_daemon(code: str) -> None:
    """Start a program in a session of its own, whose parent dies at once."""
    subprocess.run(["sh", "-c", 'setsid "$0" -c "$1" & ', sys.executable, code], check=True)


def fork_daemon(path: str) -> None:
    """Fork a process that runs no other program, whose parent dies at once."""
    child = os.fork()
    if not child:
        os.setsid()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            write_pid(path)
            signal.pause()
        os._exit(0)
    os.waitpid(child, 0)


def write_pid(path: str) -> None:
    with open(f"{path}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}.new", path)


def start_children(folder: str) -> None:
    """Start one child of each kind; each writes its pid in a file named after the kind."""
    code = {
        "session": "",
        "daemon": "",
        "stubborn": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "cleared": "",
    }
    programs = {kind: CODE.format(more=more, path=f"{folder}/{kind}") for kind, more in code.items()}
    subprocess.Popen([sys.executable, "-c", programs["session"]], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", programs["cleared"]], env={})
    run_daemon(programs["daemon"])
    run_daemon(programs["stubborn"])
    fork_daemon(f"{folder}/fork")


def read_pids(folder: os.PathLike[str]) -> dict[str, int]:
    """Return the pids of the children that have started, by kind."""
    return {name: int((folder / name).read_text()) for name in sorted(os.listdir(folder)) if name in KINDS}


def find_trees_of_driver(token: str) -> list[str]:
    """Return the workers of a driver, what they have started, and their reapers, as pids with commands.

    Args:
        token: a part of the driver's environment, which they inherit.
    """
    found = []
    for pid, (_, _, started) in read_processes().items():
        try:
            with open(f"/proc/{pid}/environ") as environment, open(f"/proc/{pid}/cmdline") as command:
                ours, line = token in environment.read(), command.read().replace("\0", " ")
        except OSError:
            continue  # it has ended
        if ours and (read_marks((pid, started)) or is_reaper(line)):
            found.append(f"{pid} {line}")
    return found


def is_reaper(command: str) -> bool:
    """Return whether a process with this command line is the reaper of a worker."""
    return "\nreap(" in command


def find_reapers(worker: int) -> list[int]:
    """Return the reapers of the worker with this pid, without those that are ending."""
    found = []
    for pid in read_processes():
        with contextlib.suppress(OSError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            if is_reaper(command) and f"\0{worker}\0" in command:
                found.append(pid)
    return found
