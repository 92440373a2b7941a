# SPDX-License-Identifier: Apache-2.0
"""Python stacks by py-spy, which does not pause the process. Shipped by value."""

import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from .processes import map_threads
from .references import read_references
from .requests import read_request

MOST_FRAMES = 64
# Where a thread begins; a stack that does not reach it is torn.
BASES = ("<module>", "_bootstrap", "_run_module_as_main", "actor_method_executor", "main_loop")
TRIES = 3
MISSING = "py-spy is not installed on this node: pip install py-spy"
# On a busy machine, or one with many processes.
LATE = "py-spy was not done in time (a longer --timeout gives it more)"


def find_pyspy() -> str:
    """Return the path of py-spy on this node; empty if it has none."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""


def dump(pid: int, program: str, offset: int, until: float) -> tuple[list[dict[str, Any]], str]:
    """Return the threads of a process, with their frames and the objects that they wait for, and why there are none."""
    note, rows = LATE if program else MISSING, None
    environ = {**os.environ, "RUST_BACKTRACE": "0", "RUST_LIB_BACKTRACE": "0"}  # whose last line would be the reason
    for _ in range(TRIES if program else 0):
        # Values of locals leave this node only if they are those of Fairlead that say what it waits for. `ray.get` has
        # the list that it waits for there, and its timeout.
        command = [program, "dump", "--nonblocking", "--json", "--locals", "--pid", str(pid)]
        if (left := until - time.monotonic()) <= 0:
            break
        try:
            done = subprocess.run(command, capture_output=True, timeout=left, env=environ, check=False)
            threads = json.loads(done.stdout) if done.returncode == 0 else None
        except subprocess.TimeoutExpired:
            note = LATE
            break
        except (OSError, ValueError) as error:
            note = f"py-spy: {type(error).__name__}"
            continue
        if threads is None:
            reasons = done.stderr.decode(errors="replace").strip().splitlines() or ["py-spy failed"]
            note = reasons[-1].lstrip(" 0123456789:")[:200]  # causes are numbered
            if "ermission denied" in note:
                break
            continue
        rows = _read_threads(pid, threads, offset)
        if all(row["stack"][-1][1].rpartition(".")[2] in BASES for row in rows):
            break  # otherwise it is torn; the last one is taken as it is
    return ([], note) if rows is None else (rows, "")


def _read_threads(pid: int, threads: Any, offset: int) -> list[dict[str, Any]]:
    rows, numbers = list[dict[str, Any]](), map_threads(pid)
    for thread in threads:
        if not (frames := thread["frames"]):
            continue
        tid, name = thread.get("os_thread_id") or pid, thread.get("thread_name") or ""
        shown = frames if len(frames) <= MOST_FRAMES else [*frames[: MOST_FRAMES - 1], frames[-1]]
        stack = tuple((frame["filename"], frame["name"], frame["line"]) for frame in shown)
        row = {"tid": numbers.get(tid, tid), "name": name, "stack": stack}
        row["references"], row["unread"] = read_references(pid, frames, offset)
        row["request"] = read_request(frames)
        rows.append(row)
    return rows
