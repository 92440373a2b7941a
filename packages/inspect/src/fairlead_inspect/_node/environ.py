# SPDX-License-Identifier: Apache-2.0
"""The environment of a process as it is now, from the memory of libc. Shipped by value.

`/proc/PID/environ` is the one that a process started with. Python's `os.environ` calls `setenv`, so the array that libc
points to has the variables that a job sets at run time, such as RANK.
"""

import ctypes
import os
import re
import struct
from collections.abc import Iterable

# No other variable leaves the node.
ALLOWED = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|NRL_WORKER_GROUP|WG_PREFIX"
    r"|\w+_VISIBLE_DEVICES|FAIRLEAD_INSPECT_\w+|TORCH_FR_\w+|TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
)
_LIBC = re.compile(r"/libc[.-][^/]*so[^/]*$")
MOST_VARIABLES = 4096
MOST_BYTES = 4096


def read_environ(pid: int) -> dict[str, str]:
    """Return the allowed variables of a process: those of now, or if its memory cannot be read, those of its start."""
    try:
        place = _find_environ(pid)
        for _ in range(3):  # a concurrent `setenv` may tear what is read
            first = _read_current(pid, place)
            if first == _read_current(pid, place):
                return _allow(first)
    except (OSError, ValueError, struct.error, OverflowError):
        pass
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return _allow(file.read().split(b"\0"))
    except OSError:
        return {}


def _allow(entries: Iterable[bytes]) -> dict[str, str]:
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
    return {name: value[:1024] for name, _, value in pairs if ALLOWED.fullmatch(name)}


def _read_current(pid: int, place: int) -> list[bytes]:
    with open(f"/proc/{pid}/mem", "rb", 0) as file:
        memory, entries = file.fileno(), list[bytes]()
        (array,) = struct.unpack("<Q", _read(memory, 8, place))
        for offset in range(0, MOST_VARIABLES * 8, 512):
            for (address,) in struct.iter_unpack("<Q", _read(memory, 512, array + offset)):
                if not address:
                    return entries
                text = b""
                while len(text) < MOST_BYTES and b"\0" not in text:
                    end = address + len(text)
                    # Up to the end of the page: the next one may not be there.
                    text += _read(memory, min(256, 4096 - end % 4096), end)
                entries.append(text.partition(b"\0")[0])
    return entries


def _read(memory: int, size: int, address: int) -> bytes:
    """Return memory of a process; raise OSError if it has ended, when the kernel returns nothing."""
    if not (content := os.pread(memory, size, address)):
        raise OSError("the process has ended")
    return content


def _find_environ(pid: int) -> int:
    """Return the address of libc's variable `environ` in a process, which has the libc of this one."""
    own, other = _find_libc("self"), _find_libc(pid)
    if own[1:] != other[1:]:
        raise ValueError("another libc")
    return ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL("libc.so.6"), "environ")) - own[0] + other[0]


def _find_libc(pid: int | str) -> tuple[int, int, int]:
    """Return where a process has libc, and the size and the age of the file, which containers of one image share."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in (line for line in file if "/libc" in line):  # of thousands
            fields = line.split(maxsplit=5)
            if not int(fields[2], 16) and _LIBC.search(fields[5]):
                status = os.stat(f"/proc/{pid}/root{fields[5].strip()}")
                return int(fields[0].partition("-")[0], 16), status.st_size, status.st_mtime_ns
    raise ValueError("no libc")
