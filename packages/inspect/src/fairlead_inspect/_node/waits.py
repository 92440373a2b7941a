# SPDX-License-Identifier: Apache-2.0
"""What a thread waits for in the kernel: a timer, a socket, a pipe, a lock, or a process. Shipped by value."""

import os
import platform
import re
import socket
import struct

# What a thread that sleeps waits for, and one that waits for a person.
SLEEP, INPUT = "time.sleep", "its standard input"
# What an event loop waits for: with a timer, it wakes up by itself.
EVENT, TIMER = "an event", "an event or a timer"
# Code in which a process waits for one that it has started.
WAITS_FOR_CHILD = re.compile(
    r"/multiprocessing/|/subprocess\.py\b|/torch/utils/data/|/concurrent/futures/process|/joblib/|/loky/|/gymnasium/vector/"
)
# The numbers of system calls, by machine: of x86-64 and of 64-bit ARM.
_CALLS = {
    "x86_64": {35: "sleep", 230: "sleep", 0: "read", 45: "read", 47: "read", 1: "write", 43: "accept", 288: "accept",
               42: "connect", 7: "poll", 271: "poll", 23: "select", 270: "select", 73: "lock", 72: "lock", 61: "child",
               247: "waitid", 232: "events", 281: "events"},
    "aarch64": {101: "sleep", 115: "sleep", 63: "read", 207: "read", 212: "read", 64: "write", 202: "accept",
                242: "accept", 203: "connect", 73: "poll", 72: "select", 32: "lock", 25: "lock", 260: "child",
                95: "waitid", 22: "events"},
}  # fmt: skip
MOST_SOCKETS = 65_536


def read_kernel_wait(pid: int, tid: int) -> str:
    """Return what a thread waits for, such as "time.sleep", "10.0.0.9:443" or "a pipe"; empty if that is not known."""
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall", encoding="ascii") as file:
            number, *arguments = file.read().split()
        call = _CALLS.get(platform.machine(), {}).get(int(number), "")
        first = int(arguments[0], 16)
        if call == "sleep" or (call == "select" and not first):
            return SLEEP
        if call == "events":
            return (
                EVENT if int(arguments[3], 16) & 0xFFFFFFFF == 0xFFFFFFFF else TIMER
            )  # of -1 milliseconds, without end
        if call == "poll":
            if int(arguments[1], 16) != 1:
                return ""
            with open(f"/proc/{pid}/mem", "rb", 0) as memory:  # its first argument is an array with a descriptor each
                (first,) = struct.unpack("<i", os.pread(memory.fileno(), 4, first))
        if call in ("read", "write", "connect", "poll"):
            return INPUT if call == "read" and not first else _describe(pid, first)
        if call == "lock":
            return f"a lock of {_describe(pid, first)}"
        if call == "accept":
            return f"connections to {_describe(pid, first)}"
        return ("a process" if first >> 31 else f"process {first}") if call == "child" else ""
    except (OSError, ValueError, IndexError, struct.error, OverflowError):
        return ""


def _describe(pid: int, descriptor: int) -> str:
    """Return what a descriptor of a process is: the other end of a socket, a pipe, or a file."""
    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    if target.startswith("pipe:"):
        return "a pipe"
    if not target.startswith("socket:["):
        return target
    inode = target[8:-1]
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
            for _, line in zip(range(MOST_SOCKETS), file, strict=False):
                fields = line.split()
                if fields[9:10] == [inode]:
                    ends = [_read_address(fields[column], family) for column in (2, 1)]
                    return next(end for end in ends if not end.endswith(":0") or end == ends[1])
    return "a socket"


def _read_address(text: str, family: int) -> str:
    """Return an address of the kernel's tables: words of 32 bits in the byte order of the machine."""
    address, _, port = text.partition(":")
    words = [int(address[begin : begin + 8], 16) for begin in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"
