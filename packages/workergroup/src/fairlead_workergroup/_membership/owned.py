# SPDX-License-Identifier: Apache-2.0
"""Everything that a group has to return: its workers, slots, ports, publications and guards."""

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack

import ray

from fairlead_placement import PlacementError

from .. import _world
from .._model import Member
from .._world import Deadline
from .core import Core
from .ends import kill_and_wait

logger = logging.getLogger(__name__)

Key = tuple[object, ...]  # what it is, and which one of its kind


class Owned:
    """What a group holds, kept apart from the group so that the group's finalizer does not keep it alive.

    The lock protects the two tables and `closed`: nothing is added after the end has taken everything out of them.
    """

    def __init__(self, core: Core) -> None:
        self.closed: bool = False
        self._core = core
        self._lock = _world.current.lock()
        self._workers: dict[str, Member] = {}  # by the ids of their actors
        self._releases: dict[Key, Callable[[], object]] = {}  # in the order in which they were acquired
        self._succeeded = True  # so far

    def own(self, key: Key, release: Callable[[], object]) -> None:
        """Note what has to be returned, and how; return it at once if the group has ended."""
        with self._lock:
            if not self.closed:
                self._releases[key] = release
                return
        self._release(key, release)

    def own_worker(self, member: Member) -> None:
        """Note a worker that has to be ended, in place of what was known of its actor; or end it, and raise."""
        with self._lock:
            if not self.closed:
                self._workers[member.actor_id] = member
                return
        self.end([member], Deadline())
        raise self._core.ended_error()

    def keys(self, kind: str) -> list[Key]:
        """Return what is held of a kind."""
        with self._lock:
            return [key for key in self._releases if key[0] == kind]

    def holds(self, key: Key) -> bool:
        """Return whether something is held."""
        return key in self._releases

    def drop(self, keys: Iterable[Key]) -> None:
        """Return some of it now; a failure is logged."""
        for key in keys:
            # Ctrl-C in a release leaves it to the end of the group.
            if (release := self._releases.get(key)) is not None:
                self._release(key, release)
                self._releases.pop(key, None)

    def keep_workers(self, actor_ids: Collection[str], until: Deadline) -> None:
        """End all workers but some, which are given by the ids of their actors."""
        with self._lock:
            others = [member for actor_id, member in self._workers.items() if actor_id not in actor_ids]
        self.end(others, until)

    def end(self, members: Collection[Member], until: Deadline) -> list[str]:
        """End workers and what they have started; return descriptions of those alive.

        Those that have ended are not owned any more: the mark of a rank would find the processes of its next worker.
        """
        left = kill_and_wait(members, until) if members and self._core.connected else []
        if not left:
            with self._lock:
                for member in members:
                    self._workers.pop(member.actor_id, None)
        return left

    def close(self, until: Deadline) -> bool:
        """End the workers, then return everything else; return whether all of that succeeded.

        After Ctrl-C in it, call it again: it does what has not been done.
        """
        with self._lock:
            self.closed = True
            workers, keys = [*self._workers.values()], [*self._releases]
        with ExitStack() as steps:  # each of them is done, also after Ctrl-C in another one
            for key in keys:
                steps.callback(self.drop, [key])
            steps.callback(self._end_all, workers, until)
        return self._succeeded

    def leak(self) -> str:
        """Return the warning for a group that is dropped while it holds something, or "" if it holds nothing."""
        if not self.keys("slot") or not self._core.connected:
            return ""
        return (
            f"The worker group {self._core.name_prefix!r} was dropped without shutdown(). Its "
            f"{len(self._workers)} worker(s) are ended in the background. Use the group in a with statement, or call "
            "shutdown()."
        )

    def _end_all(self, workers: Collection[Member], until: Deadline) -> None:
        try:
            self._succeeded &= not self.end(workers, until)
        except ray.exceptions.RayError as error:
            self._note_failure("end the workers", error)
        with self._lock:  # those that are left were logged
            self._workers.clear()

    def _release(self, key: Key, release: Callable[[], object]) -> None:
        if key[0] != "slot" and not self._core.connected:
            return  # Ray has ended, and everything with it
        try:
            release()
        except (ray.exceptions.RayError, PlacementError) as error:
            self._note_failure(f"release the {key[0]}", error)

    def _note_failure(self, what: str, error: Exception) -> None:
        if self._core.connected:
            logger.warning("Cannot %s: %s", what, error)
            self._succeeded = False
