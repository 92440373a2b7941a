# SPDX-License-Identifier: Apache-2.0
"""Whether processes are really gone. Shipped by value to the node agents: standard library only."""

from collections.abc import Sequence

from ._host import start_tick

__all__ = ["ended", "still_there"]


def still_there(processes: Sequence[tuple[int, int]]) -> list[int]:
    """Which of these (pid, start tick) still run on this machine."""
    return [pid for pid, started in processes if started >= 0 and start_tick(pid) == started]


def ended(processes: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each of these (pid, start tick) runs no more on this machine."""
    return [start_tick(pid) != started for pid, started in processes]
