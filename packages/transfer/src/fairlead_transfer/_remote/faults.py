# SPDX-License-Identifier: Apache-2.0
"""Faults that a worker commits on itself when a transfer reaches a phase. The tests plan them."""

import os
import signal

from .entry import find_shared


def commit_fault(side: str, phase: str) -> None:
    """Kill or stop this process if that has been planned for this phase."""
    how = find_shared("faults", {}).pop((side, phase), None)
    if how is not None:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
