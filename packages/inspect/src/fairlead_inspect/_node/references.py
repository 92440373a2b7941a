# SPDX-License-Identifier: Apache-2.0
"""The objects that a process waits for in `ray.get` or `ray.wait`, from its memory. Shipped by value."""

import ctypes
import os
import re
import struct
from collections.abc import Sequence
from typing import Any

MOST_REFERENCES = 100_000
ID_BYTES = 28
# The id of a reference that no object store has to be asked for.
SAMPLE = bytes(range(ID_BYTES))
# Who waits with a shorter timeout soon goes on without the objects.
POLLS_S = 60.0
LISTS = ("object_refs", "ray_waitables")
FUNCTIONS = ("get", "wait", "get_objects")
# Other items of these lists, such as `ObjectRefGenerator`, have another layout.
TYPE = b"ObjectRef"
# The offset of `tp_name` in a type, and of the type in an object.
NAME_OFFSET, TYPE_OFFSET = 24, 8


def calibrate(reference: Any) -> int:
    """Return the offset of the id in an `ObjectRef` of this process; -1 if it is not there."""
    return ctypes.string_at(id(reference), 160).find(reference.binary())


def is_get(file: str, function: str) -> bool:
    """Return whether a frame is of the functions of Ray that wait for objects."""
    return file.endswith("/ray/_private/worker.py") and function.rpartition(".")[2] in FUNCTIONS


def read_references(pid: int, frames: Sequence[Any], offset: int) -> tuple[list[tuple[str, bool, bool]], int]:
    """Return the objects that a thread waits for (id, whether any suffices, whether it polls), and how many more."""
    for frame in frames[:4]:
        if not is_get(frame["filename"], frame["name"]):
            continue
        held = {object_id["name"]: object_id for object_id in frame.get("locals") or []}
        address = next((held[name].get("addr") for name in LISTS if name in held), None)
        if address and offset > 0:
            waits = frame["name"].rpartition(".")[2] == "wait"
            timeout = re.fullmatch(r"\d[\d.e+-]*", held.get("timeout", {}).get("repr") or "")
            polls = timeout is not None and float(timeout[0]) < POLLS_S
            try:
                ids, unread = _read_list(pid, address, offset)
            except (OSError, ValueError, OverflowError, struct.error):
                return [], 1
            return [(object_id, waits, polls) for object_id in ids], unread
    return [], 0


def _read_list(pid: int, address: int, offset: int) -> tuple[list[str], int]:
    """Return the ids in a list of `ObjectRef`, and how many items it has besides."""
    with open(f"/proc/{pid}/mem", "rb", 0) as file:
        memory = file.fileno()
        # CPython's lists have their size at 16, and the address of their items at 24.
        size, items = struct.unpack("<qQ", os.pread(memory, 16, address + 16))
        if not 0 < size < 100_000_000:
            return [], 0
        count = min(size, MOST_REFERENCES)
        kinds: dict[bytes, bool] = {}
        ids = []
        for (item,) in struct.iter_unpack("<Q", os.pread(memory, 8 * count, items)):
            kind = os.pread(memory, 8, item + TYPE_OFFSET)
            if kind not in kinds:
                (name,) = struct.unpack("<Q", os.pread(memory, 8, struct.unpack("<Q", kind)[0] + NAME_OFFSET))
                kinds[kind] = os.pread(memory, 64, name).partition(b"\0")[0].rpartition(b".")[2] == TYPE
            if kinds[kind]:
                ids.append(os.pread(memory, ID_BYTES, item + offset).hex())
        return ids, size - len(ids)
