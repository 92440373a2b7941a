# SPDX-License-Identifier: Apache-2.0
"""The version that each target rank holds, as far as the driver knows."""

from collections.abc import Iterable

import ray

from ._remote.replies import Committed
from ._side import EndState, Side
from .exceptions import State


class States:
    """The versions of the target ranks; what is known of a process goes with it."""

    def __init__(self, target: Side) -> None:
        self._target = target

    def read(self) -> dict[int, State]:
        """Return what each rank holds; a restarted one holds nothing."""
        self._target.look()
        members, ends = self._target.members, self._target.ends
        pending = {ref: end for end in ends.values() if (ref := end.unconfirmed) is not None}
        for ref in ray.wait([*pending], num_returns=len(pending), timeout=0)[0] if pending else ():
            end = pending[ref]
            try:
                reply = Committed(*ray.get(ref))
            except ray.exceptions.RayError:  # the roster will know that the worker is lost
                reply = Committed("missing")
            if end.unconfirmed is ref:  # no other thread has noted it
                end.unconfirmed = None
                self.note(end, reply)
        present = {member.rank for member in members if member.failure is None and member.rank in ends}
        return {member.rank: ends[member.rank].held if member.rank in present else None for member in members}

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

    def note(self, end: EndState, reply: Committed) -> str | None:
        """Note the reply to a commit; return why the rank has not committed, None if it has."""
        if reply.outcome == "done":
            end.held = reply.version
            return None
        if reply.inconsistent:
            end.held = "inconsistent"
        if reply.outcome == "failed":
            return reply.error
        text = "another attempt has superseded this one"
        return text if reply.outcome == "superseded" else "it has lost what it had staged"
