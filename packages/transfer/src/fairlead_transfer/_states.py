# SPDX-License-Identifier: Apache-2.0
"""The version that each target rank holds, as far as the driver knows."""

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import ray

from ._side import Requests, Side
from .exceptions import State

# By the id of the link.
_states: "weakref.WeakValueDictionary[str, States]" = weakref.WeakValueDictionary()


class States:
    """The versions of the target ranks."""

    def __init__(self, target: Side) -> None:
        self._target = target
        self._states: dict[int, State] = {}
        # The process that the state is about, and the commit that has not been confirmed.
        self._processes: dict[int, tuple[int, int]] = {}
        self._unconfirmed: Requests = {}
        _states[target.link] = self

    def read(self) -> dict[int, State]:
        """Return what each rank holds; a restarted one holds nothing."""
        self._target.look()
        for rank, (_, ref) in list(self._unconfirmed.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._unconfirmed[rank]
                with contextlib.suppress(ray.exceptions.RayError):  # the roster will know that the worker is lost
                    self.note(rank, ray.get(ref))
        for member in self._target.members:
            if member.failure is not None or self._processes.get(member.rank) != member.process.key:
                self._states[member.rank] = None
        return {member.rank: self._states.get(member.rank) for member in self._target.members}

    @property
    def unconfirmed(self) -> bool:
        """Whether a rank may still be putting an earlier version into place."""
        self.read()
        return bool(self._unconfirmed)

    def decide(self, ranks: Iterable[int]) -> None:
        """Note that ranks are to commit: from now on they hold the old version, or the new one."""
        for rank in ranks:
            self._processes[rank] = self._target.members[rank].process.key
            self._states[rank] = "committing"

    def note(self, rank: int, reply: Any) -> str | None:
        """Note the reply to a commit; return why the rank has not committed, None if it has."""
        for link in reply.get("overwritten", ()):
            if (other := _states.get(link)) is not None:
                other.forget(rank)
        if "committed" in reply:
            self._states[rank] = reply["committed"]
            return None
        if reply.get("torn"):
            self._states[rank] = "torn"
        if "error" in reply:
            return f"{reply['error']}\n{reply['traceback']}".rstrip()
        return "another attempt has superseded this one" if "superseded" in reply else "it has lost what it had staged"

    def forget(self, rank: int) -> None:
        """Note that another link has overwritten what a rank held."""
        self._states[rank] = None

    def note_unconfirmed(self, requests: Requests) -> None:
        """Note commits that have not ended."""
        self._unconfirmed.update(requests)
