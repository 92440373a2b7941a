# SPDX-License-Identifier: Apache-2.0
"""Whether processes are really gone. Shipped by value to the node agents: standard library only."""

from collections.abc import Sequence

from .host import start_tick

__all__ = ["ended"]


def ended(processes: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each of these (pid, start tick) runs no more on this machine."""
    return [start_tick(pid) != started for pid, started in processes]
