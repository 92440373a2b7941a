# SPDX-License-Identifier: Apache-2.0
"""Calls of a group that another process has made, such as those of an RL controller in an actor, or of a notebook."""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import ray

from fairlead_placement import PlacementError, init_ray
from fairlead_placement.extension import actor_id_of, ask_head, head_deadline, read_board, refuse_client, run_in_thread
from fairlead_sharding import NamedSharding

from .._membership.core import Core
from .._model import Member, Restart
from .._observe.board import ANSWER_S, KEY, PublishedGroup, find_group, read_group, read_groups
from .._start.worker_class import WorkerClass
from .._status import STUCK_AFTER_S, WorkerStatus, read_statuses
from .._world import Deadline
from ..exceptions import StaleGroupError, WorkerFailure, WorkerFailureError, WorkerGroupError, format_ranks
from .map import MapOptions
from .view import Target, TypedCalls

# A publication that is on its way arrives within this time, and how often it is looked for.
RENEWED_S = 2.0
AGAIN_S = 0.01
# For all requests of one call to Ray's head.
HEAD_S = 30.0
# Ray's head is asked for each actor by its name.
ASKED_AT_ONCE = 16
REMEDY = (
    "Only the process that made the group starts workers again: with `restart_failed_workers()`, or with its next call "
    "if it has `Restart(on_failure=True)`. Make this call again after that."
)


@dataclass(frozen=True)
class GroupIdentity:
    """The identity by which any process of its cluster finds a group."""

    name: str  # the name of the group
    group_id: str  # identifies it among all groups
    job_id: str  # Ray's id of the job that made it
    worker_id: str  # Ray's id of the process that made it
    session: str  # Ray's name of the session of its cluster
    address: str  # the address of the cluster

    @classmethod
    def here(cls, name: str, group_id: str, job_id: str, worker_id: str) -> "GroupIdentity":
        """Return the identity of a group of the cluster that this process is connected to."""
        context = ray.get_runtime_context()
        return cls(name, group_id, job_id, worker_id, context.get_session_name(), context.gcs_address)

    def connect(self) -> None:
        """Connect this process to the cluster of the group, unless it is."""
        refuse_client()
        if not ray.is_initialized():
            init_ray(address=self.address)
        here = ray.get_runtime_context()
        if here.get_session_name() != self.session:
            raise WorkerGroupError(
                f"{self} is on the cluster at {self.address}, and this process is connected to {here.gcs_address}. Use "
                "the handle in a process of that cluster, or call ray.shutdown() first."
            )

    def read(self) -> PublishedGroup:
        """Return the group as it is published now."""
        if (group := read_group(self.group_id, self.job_id, self.worker_id)) is None:
            raise self.ended_error()
        return group

    def ended_error(self) -> WorkerGroupError:
        """Return the error for the use of a group that has ended."""
        return WorkerGroupError(f"{self} has ended: it was shut down, or the process that made it has ended.")

    def __str__(self) -> str:
        return f"The group {self.name!r} ({self.group_id[:6]})"


class GroupHandle(TypedCalls):
    """A group of workers that another process has made. `attach` and `RayWorkerGroup.handle` return it.

    A handle can be pickled, sent to any process of the cluster, and kept there. It holds no actor handle and keeps no
    worker alive: the group ends with the process that made it. It calls the workers itself, so it works while the
    process that made the group is busy or stopped.

    `call`, `at`, `with_options` and `map` are those of the group. Only the process that made the group restarts it and
    ends it, so `retries` is refused, and its timeouts and its defaults of `map` do not apply.

    A call runs in one epoch of the group. If it meets a restart or a resize, taking its results cancels the rest and
    raises `StaleGroupError`, which says which ranks have run it and which have refused it. This may take a few seconds
    more than the timeout of the call. Make the call again then: it reaches the present workers.

    Calls of several processes reach the workers in no common order, so all calls with collectives have to come from one
    process. On an event loop, a call blocks the loop for the request to the board, about a millisecond.
    """

    def __init__(self, identity: GroupIdentity) -> None:
        self._identity = identity
        # It protects what is known of the group: a process connects once, and one thread at a time reads news.
        self._lock = threading.RLock()
        self._core: _ClientCore | None = None

    def __repr__(self) -> str:
        return f"GroupHandle({self._identity.name!r}, {self._identity.group_id[:6]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._identity,)

    @property
    def name(self) -> str:
        """The name of the group."""
        return self._identity.name

    @property
    def group_id(self) -> str:
        """The id of the group, which no other group has."""
        return self._identity.group_id

    @property
    def group_epoch(self) -> int:
        """The epoch of the group that the handle has read last."""
        return self._connect().now.group_epoch

    @property
    def sharding_annotations(self) -> NamedSharding:
        """The axes over the ranks."""
        return self._connect().now.sharding

    @property
    def _target(self) -> Target:  # type: ignore[override]
        return Target(self._connect(), MapOptions("round_robin", move_items=False))

    def status(self, *, stuck_after_s: float = STUCK_AFTER_S) -> list[WorkerStatus]:
        """Return what each worker does, by rank, as `RayWorkerGroup.get_worker_status` does.

        Args:
            stuck_after_s: a busy worker is "stuck" after this many seconds without progress.

        Raises:
            ValueError: `stuck_after_s` is not a positive number.
            WorkerGroupError: the group has ended.
        """
        core = self._connect()
        with head_deadline(HEAD_S):
            core.renew()
            return read_statuses(core, stuck_after_s)

    def _connect(self) -> "_ClientCore":
        """Return the core of this process, which is made at the first use."""
        with self._lock:
            if self._core is None or not self._core.connection.is_open:
                self._identity.connect()
                with head_deadline(HEAD_S):
                    self._core = _ClientCore(self._identity, self._identity.read(), self._lock)
            return self._core


def attach(name: str, address: str | None = None) -> GroupHandle:
    """Return a handle of a group that another process of a cluster has made.

    Args:
        name: the name of the group; if no group has that name, at least the first six digits of its id, which the
            error shows if several groups have the name.
        address: the address of the cluster, as for `init_ray`; None for the one that this process is connected to, or
            else for "auto".

    Raises:
        WorkerGroupError: there is no such group, or there are several.
        PlacementError: there is no cluster, it wants another token, or this process is connected to another one.
    """
    init_ray(address=address or "auto")
    with head_deadline(HEAD_S):
        group = find_group(name)
    return GroupHandle(GroupIdentity.here(group.name, group.group_id, group.board.job_id, group.board.owner))


class _ClientCore(Core):
    """The core of a process that has not made the group."""

    is_owner: ClassVar[bool] = False

    def __init__(self, identity: GroupIdentity, group: PublishedGroup, reading: threading.RLock) -> None:
        state = group.state
        super().__init__(group.name, state.places, state.sharding, policy=Restart(), remedy=REMEDY)
        self.worker_class = WorkerClass.from_dict(group.methods)
        self._identity = identity
        self._reading = reading  # that of the handle
        self._adopt(group)

    def check_retries(self, retries: int) -> None:
        if retries:
            raise ValueError(
                f"retries={retries} needs a call of the process that made the group, which restarts the workers"
            )

    def failure_error(self, lost: Sequence[WorkerFailure]) -> WorkerFailureError | StaleGroupError:
        """Return the error that reports losses, or the one about workers that have been or are being replaced."""
        with contextlib.suppress(WorkerGroupError, PlacementError):
            self.renew()
        still_lost = self.now.lost.keys() - set(self.now.restarting)
        replaced = [failure.rank for failure in lost if failure.rank not in still_lost]
        if not replaced:
            return super().failure_error(lost)
        return StaleGroupError(
            f"rank(s) {format_ranks(replaced)} of {self.name_prefix!r} are being restarted, or have been since this "
            "handle has read the group, and may have run the call before. Make the call again.",
            self.now.group_epoch,
        )

    def renew(self, at_least: int = 0) -> None:
        """Read the members again if their owner has published others; wait shortly for those of an epoch."""
        until = Deadline.after(RENEWED_S)
        self._read_newer()
        while self.now.group_epoch < at_least and not until.passed:
            time.sleep(AGAIN_S)
            self._read_newer()

    def _read_newer(self) -> None:
        self.connection.check()
        with self._reading, head_deadline(HEAD_S):
            group, board, key = self._group, self._group.board, KEY + self._identity.group_id
            answer = read_board(board, key, group.publication, timeout_s=ANSWER_S)
            if not isinstance(answer, tuple):
                self._adopt(self._identity.read())  # another agent may have taken its place
            elif answer[0] == 0:
                raise self._identity.ended_error()
            elif answer[1] is not None:
                self._adopt(read_groups([(board, answer[1])])[0])

    def _adopt(self, group: PublishedGroup) -> None:
        """Take over the members of a group as they are published."""
        now, state = self.now, group.state
        handles = {member.actor_id: member.handle for member in now.members if member.handle is not None}
        new = [member for member in state.members if member.pid and member.actor_id not in handles]
        handles |= _find_actors(new, group.namespace)
        members = []
        for fresh in state.members:
            known = now.members[fresh.rank] if now.has([fresh.rank]) else fresh
            if known == fresh and known.lost is not None:  # a loss that this process has met
                members.append(known)
                continue
            handle = handles.get(fresh.actor_id) if fresh.pid else None
            cause = "Ray has no actor of its name: it has ended" if fresh.pid else "it has not started yet"
            lost = None if handle is not None else fresh.failure("killed", cause)
            members.append(replace(fresh, handle=handle, lost=lost))
        with self.turn:
            self._note_members(replace(state, members=tuple(members)))
            self.advance(
                group_epoch=state.group_epoch,
                sharding=now.sharding if state.sharding.shape == now.sharding.shape else state.sharding,
                members=tuple(members),
                phase=state.phase,
                restarting=state.restarting,
            )
        self._group = group


def _find_actors(members: Sequence[Member], namespace: str) -> dict[str, Any]:
    """Return the handles of workers that are alive, by the ids of their actors."""

    def find(member: Member) -> Any:
        try:
            return ray.get_actor(member.actor_name, namespace=namespace)
        except ValueError:
            return None  # it has ended

    def find_all() -> list[Any]:
        handles: list[Any] = []
        for start in range(0, len(members), ASKED_AT_ONCE):
            jobs = [run_in_thread(find, member) for member in members[start : start + ASKED_AT_ONCE]]
            handles += [job.future.result() for job in jobs]
        return handles

    handles = ask_head("find the workers of a group", find_all) if members else []
    return {actor_id_of(handle): handle for handle in handles if handle is not None}
