# SPDX-License-Identifier: Apache-2.0
"""Faults that a worker commits on itself when a transfer reaches a phase; for tests."""

import os
import signal
import sys
import types
from typing import Any

from .entry import SHARED


def _planned() -> dict[tuple[str, str], str]:
    shared: Any = sys.modules.setdefault(SHARED, types.ModuleType(SHARED))
    planned: dict[tuple[str, str], str] = shared.__dict__.setdefault("faults", {})
    return planned


def plan_fault(worker: Any, side: str, phase: str, how: str) -> None:
    """Have this process be killed or stopped when it reaches a phase of the next transfer."""
    _planned()[side, phase] = how


def commit_fault(side: str, phase: str) -> None:
    """Commit the fault that has been planned for this phase, if there is one."""
    how = _planned().pop((side, phase), None)
    if how is not None:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
