# SPDX-License-Identifier: Apache-2.0
"""Everything that a group has to return: its workers, slots, ports and publications; and the end of the group."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

import ray

from fairlead_placement import HeadTimeoutError, PlacementError
from fairlead_placement.extension import choose_alive, collect, group_pairs, head_deadline, run_on_nodes, wait_until

from .. import _world
from .._model import Member
from .._observe.query import actors_being_made, draining_nodes
from .._ray_private import is_known_dead
from .._remote.process import WORKER_GRACE_S, end_trees
from .._world import NEVER, Deadline, wait_for, wait_for_event
from .core import Changes, Core

logger = logging.getLogger(__name__)

# Ray takes one to three seconds to start processes. Actors that find no room are not waited for longer than this.
MADE_S = 5.0
# How long the nodes wait for a worker that Ray does not end, and for children that do not end.
GONE_S = 20.0
# The time for the end of workers when the deadline is about to pass.
LAST_LOOK_S = 5.0
# How long an answer may take on its way.
ANSWERED_S = 2.0
# When the workers have ended, the change that is under way has nothing to wait for.
JOIN_S = 20.0

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
        self.end([member], NEVER)
        raise self._core.ended_error()

    def keys(self, kind: str) -> list[Key]:
        with self._lock:
            return [key for key in self._releases if key[0] == kind]

    def holds(self, key: Key) -> bool:
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
        """End workers and what they have started; return descriptions of those alive. The others are owned no more."""
        left = kill_and_wait(members, until) if members and self._core.connection.is_open else []
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
        self._end_all(workers, until)
        self.drop(reversed(keys))
        return self._succeeded

    def leak(self) -> str:
        """Return the warning for a group that is dropped while it holds something, or "" if it holds nothing."""
        if not self.keys("slot") or not self._core.connection.is_open:
            return ""
        return (
            f"The worker group {self._core.name_prefix!r} was dropped without shutdown(). Its workers are ended in the "
            "background. Use the group in a with statement, or call shutdown()."
        )

    def _end_all(self, workers: Collection[Member], until: Deadline) -> None:
        try:
            self._succeeded &= not self.end(workers, until)
        except ray.exceptions.RayError as error:
            self._note_failure("end the workers", error)
        with self._lock:  # those that are left were logged
            self._workers.clear()

    def _release(self, key: Key, release: Callable[[], object]) -> None:
        if key[0] != "slot" and not self._core.connection.is_open:
            return  # Ray has ended, and everything with it
        try:
            release()
        except (ray.exceptions.RayError, PlacementError) as error:
            self._note_failure(f"release the {key[0]}", error)

    def _note_failure(self, what: str, error: Exception) -> None:
        if self._core.connection.is_open:
            logger.warning("Cannot %s: %s", what, error)
            self._succeeded = False


class Shutdown:
    """End a group once, on the thread of the first caller; the others wait for that."""

    def __init__(self, core: Core, changes: Changes, owned: Owned) -> None:
        self._core = core
        self._changes = changes
        self._owned = owned
        self._turn = deque([True])  # of the one thread that ends the group
        self._thread: int | None = None
        # Set when no cleanup is waited for any more, and when everything has ended.
        self._is_forced = threading.Event()
        self._ended = _world.current.event()
        self._succeeded = False

    def run(self, cleanup_method: str | None, timeout: float | None, *, force: bool) -> bool:
        """End the group; see `RayWorkerGroup.shutdown`. It takes no lock that a signal handler's thread may hold."""
        until, me, is_clean = Deadline.after(timeout), _world.current.thread(), False
        self._core.ending = True
        if force:
            self._is_forced.set()
        try:
            self._turn.pop()
        except IndexError:
            if self._thread != me:  # otherwise a signal handler came into the end of the group
                if not wait_for_event(self._ended, until):
                    self._is_forced.set()
                self._ended.wait()
            return self._succeeded
        self._thread = me
        try:
            self._core.refuse_waiting()
            is_clean = cleanup_method is None or force or self._clean_up(cleanup_method, until)
        finally:
            try:
                is_returned = self._end(until)
                self._succeeded = self._changes.join(Deadline.after(JOIN_S)) and is_clean and is_returned
            finally:
                self._ended.set()
        return self._succeeded

    def _end(self, until: Deadline) -> bool:
        try:
            self._core.end()
            return self._owned.close(until)
        except BaseException:  # Ctrl-C: what has been done is not done again
            self._core.end()
            self._owned.close(until)
            raise

    def _clean_up(self, cleanup_method: str, until: Deadline) -> bool:
        """Run the user's method on the living workers; return whether all went well."""
        core = self._core
        if not core.is_there or not core.connection.is_open:
            return True
        # A change that is under way gives up at its next step. Until then it may end a worker under its cleanup.
        self._changes.join(Deadline.after(until.left(at_most=JOIN_S)))
        living = [member for member in core.now.members if member.lost is None and not is_known_dead(member.handle)]
        began = _world.current.now()
        how = {"method": cleanup_method, "silent": True}
        calls = {member.rank: member.handle._fairlead_call.remote(how) for member in living}
        errors, late = wait_for(calls, until, self._is_forced.is_set, patient=True)
        for rank, error in errors.items():
            logger.warning("The cleanup %r of rank %d failed: %s", cleanup_method, rank, error)
        if late:
            took = _world.current.now() - began
            logger.warning("The cleanup %r did not end within %.3g s on ranks %s.", cleanup_method, took, late)
        return not errors and not late


def kill_and_wait(workers: Collection[Member], until: Deadline) -> list[str]:
    """End workers and all that they have started; log and return descriptions of what is left.

    Rank 0 has the store of torch.distributed, so it is killed last. If Ray's head does not answer, functions on the
    nodes end the processes. It takes less time than is left, because other things are returned after it, but
    `LAST_LOOK_S` in any case.
    """
    deadline = time.monotonic() + max(LAST_LOOK_S, 0.8 * (until.left(at_most=GONE_S) or 0.0))
    by_ray = _wait_until_created(workers, deadline)
    for worker in sorted(workers, key=lambda worker: -worker.rank):
        ray.kill(worker.handle)
    if by_ray:
        # A dead actor answers this at once with an error; nothing answers after a kill except that.
        sends = {number: worker.handle.__ray_ready__.remote for number, worker in enumerate(workers)}
        answers = collect(sends, max(0.1, deadline - time.monotonic()))
        alive = sum(isinstance(error, ray.exceptions.GetTimeoutError) for _, error in answers.values())
        left = _end_trees(workers, deadline, grace_s=WORKER_GRACE_S)
        left += [f"{alive} worker(s) that Ray has not ended in time"] if alive and not left else []
    else:
        left = _end_trees(workers, min(deadline, time.monotonic() + LAST_LOOK_S), grace_s=0.0)
        left.append(f"{len(workers)} worker(s) whose end Ray's head has not confirmed, because it does not answer")
    if left:
        logger.warning("Still alive after the end of workers: %s.", "; ".join(left))
    return left


def _wait_until_created(workers: Collection[Member], until: float) -> bool:
    """Wait a moment for actors that Ray has not created yet; return whether Ray's head answers.

    If an actor is killed after Ray has leased a process for it and before it is created there, Ray (2.60) leaves the
    process behind. That process holds the slot, and the next worker in the slot waits for ever.
    """
    ours = {worker.actor_id for worker in workers}
    within_s = min(MADE_S, max(0.1, until - time.monotonic()))
    try:
        with head_deadline(within_s):
            wait_until(lambda: not ours & actors_being_made(), time.monotonic() + within_s, longest_s=0.5)
    except HeadTimeoutError as error:
        logger.warning("Workers are ended without Ray's head: %s", error)
        return False
    return True


def _end_trees(workers: Iterable[Member], deadline: float, *, grace_s: float) -> list[str]:
    """End the processes of workers on all nodes at once; return descriptions of those alive at the deadline."""
    by_node, pause, left = group_pairs((worker.node_id, worker) for worker in workers), 0.1, list[str]()
    while by_node:
        within_s = max(0.5, deadline - time.monotonic())
        asks = {
            node_id: (
                [worker.key for worker in by_node[node_id] if worker.pid],
                [worker.mark for worker in by_node[node_id]],
                max(0.1, within_s - ANSWERED_S),
                grace_s,
            )
            for node_id in choose_alive(by_node)
        }
        silent: dict[str, Exception] = {}
        for node_id, answer in run_on_nodes(end_trees, asks, timeout_s=within_s).items():
            if isinstance(answer, Exception):
                silent[node_id] = answer
            else:
                left += [f"pid {pid} on node {node_id[:8]}" for pid, _ in answer]
        draining = frozenset[str]()
        if silent:
            with contextlib.suppress(HeadTimeoutError), head_deadline(LAST_LOOK_S):
                draining = draining_nodes()
        # Ray starts no task on a node that drains, and the node ends by itself.
        for node_id in silent.keys() & draining:
            text = "Cannot look for processes of workers on node %s, which drains; they end with it at the latest: %s"
            logger.warning(text, node_id[:8], silent.pop(node_id))
        # A node that does not answer may be about to go.
        if left or not silent or time.monotonic() >= deadline:
            return left + [f"workers on node {node[:8]}, which does not answer: {why}" for node, why in silent.items()]
        by_node = {node_id: by_node[node_id] for node_id in silent}
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return left
