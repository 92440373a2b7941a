# SPDX-License-Identifier: Apache-2.0
"""Python stacks by py-spy, which does not pause the process. Shipped by value."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from .references import is_get, read_references

DUMP_S = 2.0
MOST_FRAMES = 64
# Where a thread begins; a stack that does not reach it is torn.
BASES = ("<module>", "_bootstrap", "_run_module_as_main", "actor_method_executor", "main_loop")
TRIES = 3


def find_pyspy() -> str:
    """Return the path of py-spy on this node; empty if it has none."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""


def dump(pid: int, program: str, offset: int) -> tuple[list[dict[str, Any]], list[tuple[str, bool]], str]:
    """Return the threads of a process with their frames, the objects that they wait for, and why there are none.

    Args:
        pid: the process.
        program: the path of py-spy.
        offset: of the id in an `ObjectRef`.
    """
    note = "py-spy is not installed on this node: pip install py-spy"
    for _ in range(TRIES if program else 0):
        # No value of a local leaves this function, but for the address of the list that `ray.get` waits for.
        command = [program, "dump", "--nonblocking", "--json", "--locals", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=DUMP_S, check=False)
            threads = json.loads(done.stdout) if done.returncode == 0 else None
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            note = f"py-spy: {type(error).__name__}"
            continue
        if threads is None:
            note = (done.stderr.decode(errors="replace").strip().splitlines() or ["py-spy failed"])[-1][:200]
            if "ermission denied" in note:
                break
            continue
        rows: list[dict[str, Any]] = []
        references: list[tuple[str, bool]] = []
        for thread in threads:
            frames = thread["frames"]
            if not frames:
                continue
            rows.append(
                {
                    "tid": thread.get("os_thread_id") or pid,
                    "name": thread.get("thread_name") or "",
                    "stack": [
                        (one["filename"], one["name"], one["line"]) for one in frames[: MOST_FRAMES - 1] + frames[-1:]
                    ],
                }
            )
            if any(is_get(one["filename"], one["name"]) for one in frames[:4]):
                references += read_references(pid, frames, offset)
        if all(row["stack"][-1][1].rpartition(".")[2] in BASES for row in rows):
            return rows, references, ""
        note = ""  # the last one is taken as it is
    return (rows, references, "") if not note else ([], [], note)
