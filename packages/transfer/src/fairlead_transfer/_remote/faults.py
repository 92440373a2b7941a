# SPDX-License-Identifier: Apache-2.0
"""Faults that a worker commits on itself when a transfer reaches a phase; for tests."""

import os
import signal
from typing import Any

from .entry import find_shared


def plan_fault(worker: Any, side: str, phase: str, how: str) -> None:
    """Have this process be killed or stopped when it reaches a phase of the next transfer."""
    find_shared("faults", {})[side, phase] = how


def commit_fault(side: str, phase: str) -> None:
    """Commit the fault that has been planned for this phase, if there is one."""
    how = find_shared("faults", {}).pop((side, phase), None)
    if how is not None:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
