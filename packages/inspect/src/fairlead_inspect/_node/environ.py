# SPDX-License-Identifier: Apache-2.0
"""The environment of a process as it is now, from the memory of libc. Shipped by value.

`/proc/PID/environ` is the one that a process started with. Python's `os.environ` calls `setenv`, so the array that libc
points to has the variables that a job sets at run time, such as RANK.
"""

import re
import struct
from collections.abc import Iterable

# No other variable leaves the node.
ALLOWED = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|NRL_WORKER_GROUP|WG_PREFIX"
    r"|\w+_VISIBLE_DEVICES|FAIRLEAD_INSPECT_\w+|TORCH_FR_\w+|TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
)
_LIBC = re.compile(r"/(?:libc[.-][^/]*so[^/]*|ld-musl[^/]*)\s*$")
MOST_VARIABLES = 4096
MOST_BYTES = 4096


def read_environ(pid: int) -> dict[str, str]:
    """Return the allowed variables of a process: those of now, or if its memory cannot be read, those of its start."""
    try:
        for _ in range(3):  # a concurrent `setenv` may tear what is read
            first = _read_current(pid)
            if first == _read_current(pid):
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


def _read_current(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:

        def read(address: int, size: int) -> bytes:
            memory.seek(address)
            return memory.read(size)

        (array,) = struct.unpack("<Q", read(_find_environ(pid), 8))
        entries: list[bytes] = []
        for at in range(0, MOST_VARIABLES * 8, 512):
            for (address,) in struct.iter_unpack("<Q", read(array + at, 512)):
                if not address:
                    return entries
                entries.append(_read_text(read, address))
    return entries


def _read_text(read: object, address: int) -> bytes:
    text = b""
    while len(text) < MOST_BYTES and b"\0" not in text:
        # Up to the end of the page: the next one may not be there.
        text += read(address + len(text), min(256, 4096 - (address + len(text)) % 4096))  # type: ignore[operator]
    return text.partition(b"\0")[0]


def _find_environ(pid: int) -> int:
    """Return the address of libc's variable `environ` in a process."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and not int(fields[2], 16) and _LIBC.search(fields[5]):
                return int(fields[0].partition("-")[0], 16) + _find_symbol(pid, fields[5].strip())
    raise ValueError("no libc")


_offsets: dict[str, int] = {}


def _find_symbol(pid: int, path: str) -> int:
    """Return the value of the dynamic symbol `environ` of a 64-bit ELF file, as the process sees the file."""
    if path in _offsets:
        return _offsets[path]
    with open(f"/proc/{pid}/root{path}", "rb") as file:
        image = file.read()
    if image[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + at * size) for at in range(count)]
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        names = sections[link][4]
        for at in range(start, start + length, 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            if section and image[names + name : names + name + 8] == b"environ\0":
                _offsets[path] = value
                return int(value)
    raise ValueError("no symbol environ")
