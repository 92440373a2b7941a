# SPDX-License-Identifier: Apache-2.0
"""Whether several hosts use one folder of environments."""

import functools
import os
from pathlib import Path

from .store import USED, host_id

__all__ = ["is_shared", "on_shared_file_system"]

SHARED_FILE_SYSTEMS = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "9p", "fuse", "smb", "cifs", "virtiofs", "weka")


def is_shared(folder: str | Path) -> bool:
    """Return whether another host uses an environment, or could by its file system.

    The file system is looked up once in a process: an environment that is there is found in a fraction of that time.
    """
    if _by_file_system(os.path.dirname(folder)):
        return True
    try:
        marks = os.listdir(os.path.join(folder, USED))
    except OSError:  # it goes away
        return False
    return len(marks) > 1 or (len(marks) == 1 and marks[0] != host_id())


@functools.lru_cache(maxsize=64)
def _by_file_system(root: str) -> bool:
    return on_shared_file_system(root)


def on_shared_file_system(path: str | Path) -> bool:
    """By the table of mounts; where there is none it is taken to be local."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    real = os.path.realpath(path)
    under = [(point, kind) for _, point, kind, *_ in mounts if os.path.commonpath([real, point]) == point]
    _, kind = max(under, key=lambda one: len(one[0]), default=("", ""))
    return kind.startswith(SHARED_FILE_SYSTEMS)
