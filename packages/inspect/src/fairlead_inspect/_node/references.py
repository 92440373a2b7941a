# SPDX-License-Identifier: Apache-2.0
"""The objects that a process waits for in `ray.get` or `ray.wait`, from its memory. Shipped by value."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

MOST_REFERENCES = 256
ID_BYTES = 28
# The id of a reference that no object store has to be asked for.
SAMPLE = bytes(range(ID_BYTES))
# Who waits with a shorter timeout soon goes on without the objects.
POLLS_S = 60.0
LISTS = ("object_refs", "ray_waitables")
FUNCTIONS = ("get", "wait", "get_objects")


def calibrate(reference: Any) -> int:
    """Return the offset of the id in an `ObjectRef` of this process; -1 if it is not there."""
    return ctypes.string_at(id(reference), 160).find(reference.binary())


def is_get(file: str, function: str) -> bool:
    """Return whether a frame is of the functions of Ray that wait for objects."""
    return file.endswith("/ray/_private/worker.py") and function.rpartition(".")[2] in FUNCTIONS


def read_references(pid: int, frames: Sequence[Any], offset: int) -> list[tuple[str, bool, bool]]:
    """Return the ids of the objects that a thread waits for, whether any of them suffices, and whether it polls.

    None if they are unreadable.
    """
    for frame in frames[:4]:
        is_there = is_get(frame["filename"], frame["name"])
        held = {one["name"]: one for one in frame.get("locals") or [] if is_there}
        address = next((held[name].get("addr") for name in LISTS if name in held), None)
        if address and offset > 0:
            waits = frame["name"].rpartition(".")[2] == "wait"
            polls = _is_short(held.get("timeout", {}).get("repr"))
            try:
                return [(one, waits, polls) for one in _read_list(pid, address, offset)]
            except (OSError, ValueError, OverflowError, struct.error):
                return []
    return []


def _is_short(timeout: str | None) -> bool:
    try:
        return float(timeout or "inf") < POLLS_S
    except ValueError:
        return False  # "None"


def _read_list(pid: int, address: int, offset: int) -> list[str]:
    """Return the ids in a list of `ObjectRef`, by the layout of CPython's lists: size at 16, items at 24."""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:

        def read(at: int, count: int) -> bytes:
            memory.seek(at)
            return memory.read(count)

        size, items = struct.unpack("<qQ", read(address + 16, 16))
        if not 0 < size < 1_000_000:
            return []
        count = min(size, MOST_REFERENCES)
        pointers = struct.unpack(f"<{count}Q", read(items, 8 * count))
        return [read(pointer + offset, ID_BYTES).hex() for pointer in pointers]
