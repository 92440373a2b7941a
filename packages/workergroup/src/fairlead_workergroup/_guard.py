# SPDX-License-Identifier: Apache-2.0
"""Ends processes of this machine that use too much memory. Shipped by value to the node agents: standard library only.

What a shipped function keeps in its module is gone with the call, so the guards are kept in a module of their own.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

from ._host import start_tick

__all__ = ["start_guard", "verdicts"]

Process = tuple[int, int]
EVERY_S = 0.2


def start_guard(processes: Sequence[Process], name: str, limit: int) -> list[bool]:
    """Watch processes, by pid and start tick, until they have ended; which of them there are.

    Args:
        processes: whom.
        name: for whom, which `verdicts` is asked by.
        limit: bytes of resident memory.
    """
    threading.Thread(target=_watch, args=(name, list(processes), limit), daemon=True, name="fairlead-guard").start()
    return [start_tick(pid) == started for pid, started in processes]


def verdicts(processes: Sequence[Process], name: str) -> list[int | None]:
    """How many bytes each process had when it was ended for it; None for one that was not."""
    ended = _ended(name)
    return [ended.get(process) for process in map(tuple, processes)]  # type: ignore[arg-type]


def _ended(name: str) -> dict[Process, int]:
    kept: Any = sys.modules.setdefault("_fairlead_guards", types.ModuleType("_fairlead_guards"))
    ended: dict[Process, int] = kept.__dict__.setdefault(name, {})
    return ended


def _watch(name: str, processes: list[Process], limit: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while processes := [process for process in processes if start_tick(process[0]) == process[1]]:
        for pid, started in processes:
            try:
                with open(f"/proc/{pid}/statm") as file:
                    resident = int(file.read().split()[1]) * page
            except OSError:
                continue  # it has just ended
            if resident > limit and start_tick(pid) == started:
                # Before the kill: whoever sees the death must find the reason.
                _ended(name)[pid, started] = resident
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(pid, signal.SIGKILL)
        time.sleep(EVERY_S)
