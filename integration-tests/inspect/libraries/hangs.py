# SPDX-License-Identifier: Apache-2.0
"""What every program of this folder uses: a Ray of its own, and a note of the moment at which it hangs."""

import json
import os
import sys
import time


def start_ray(num_cpus: int = 4, **options: object) -> None:
    """Start a Ray for this program, and write its address to the file `$ADDRESS_FILE`."""
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **options)
    write(os.environ["ADDRESS_FILE"], ray.get_runtime_context().gcs_address)


def mark(**facts: object) -> None:
    """Note in the file `$MARK_FILE` that this process, at the line of its caller, is about to hang.

    A healthy program calls it when it is in the middle of its long work.

    Args:
        facts: `pid=` of another process that is guilty, `pending="name"` of a task, actor or placement group that never
            starts; nothing if this process is the guilty one.
    """
    frame = sys._getframe(1)
    known = {"pid": os.getpid(), "function": frame.f_code.co_name, "line": frame.f_lineno, "time": time.time()}
    write(os.environ["MARK_FILE"], json.dumps(known | facts))


def write(path: str, text: str) -> None:
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.{os.getpid()}", path)
