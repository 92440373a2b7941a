# SPDX-License-Identifier: Apache-2.0
"""The version that each target rank holds, as far as the driver knows."""

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import ray

from ._side import EndState, Side
from .exceptions import State

# By the id of the link.
_states: "weakref.WeakValueDictionary[str, States]" = weakref.WeakValueDictionary()


class States:
    """The versions of the target ranks; what is known of a process goes with it."""

    def __init__(self, target: Side) -> None:
        self._target = target
        _states[target.link] = self

    def read(self) -> dict[int, State]:
        """Return what each rank holds; a restarted one holds nothing."""
        self._target.look()
        members, ends = self._target.members, self._target.ends
        pending = {ref: (rank, end) for rank, end in ends.items() if (ref := end.unconfirmed) is not None}
        for ref in ray.wait([*pending], num_returns=len(pending), timeout=0)[0] if pending else ():
            rank, end = pending[ref]
            reply: Any = {}
            with contextlib.suppress(ray.exceptions.RayError):  # the roster will know that the worker is lost
                reply = ray.get(ref)
            if end.unconfirmed is ref:  # no other thread has noted it
                end.unconfirmed = None
                self.note(rank, end, reply)
        there = {member.rank for member in members if member.failure is None and member.rank in ends}
        return {member.rank: ends[member.rank].held if member.rank in there else None for member in members}

    @property
    def unconfirmed(self) -> bool:
        """Whether a rank may still be putting an earlier version into place."""
        self.read()
        return any(end.unconfirmed is not None for end in self._target.ends.values())

    def decide(self, ranks: Iterable[int]) -> dict[int, EndState]:
        """Note that ranks are to commit, and return their ends: from now on they hold the old version or the new."""
        ends = {rank: self._target.ends[rank] for rank in ranks}
        for end in ends.values():
            end.held = "committing"
        return ends

    def note(self, rank: int, end: EndState, reply: Any) -> str | None:
        """Note the reply to a commit; return why the rank has not committed, None if it has."""
        for link in reply.get("overwritten", ()):
            if (other := _states.get(link)) is not None:
                other.forget(rank)
        if "committed" in reply:
            end.held = reply["committed"]
            return None
        if reply.get("inconsistent"):
            end.held = "inconsistent"
        if "error" in reply:
            return f"{reply['error']}\n{reply['traceback']}".rstrip()
        return "another attempt has superseded this one" if "superseded" in reply else "it has lost what it had staged"

    def forget(self, rank: int) -> None:
        """Note that another link has overwritten what a rank held."""
        if (end := self._target.ends.get(rank)) is not None:
            end.held = None
