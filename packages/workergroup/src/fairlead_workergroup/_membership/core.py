# SPDX-License-Identifier: Apache-2.0
"""A group without its public face: who is in it, and the sending of calls, which wait while the group changes."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

from fairlead_sharding import NamedSharding

from .. import _replies as replies
from .. import _world
from .._model import GroupState, Member, Place, Restart, describe_place
from .._replies import Request
from .._start.worker_class import Method, WorkerClass
from .._world import Deadline, Event, wait_for_event
from ..exceptions import STATE, CallTimeoutError, StaleGroupError, WorkerFailure, WorkerFailureError, WorkerGroupError

CLUSTER_GONE = (
    "The cluster of this group has been shut down, and its workers with it. Reserve the cluster again, and create a "
    "new group on it."
)
BROKEN = (
    "These ranks did not complete a resize, so no call is sent until the group is repaired: `restart_failed_workers()` "
    "starts them again and runs on_resize on all workers once more, and so does another `resize`."
)


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """A call that is ready to be sent, now or later; `_calls.plan` makes it."""

    method: Method  # or the function in its place
    recipients: Any  # its `Recipients`
    requests: Sequence[Request]  # to each recipient
    began: float  # when its caller made it
    deadline: Deadline  # of its results
    options: Any  # its `CallOptions`
    sharding: NamedSharding | None = None  # the axes that it was planned on; None if its ranks were given by number
    is_hook: bool = False  # whether it belongs to the change that is under way, and does not wait for it
    # Plans the same call on the present axes; None if its values fit one size of the group only.
    replan: "Callable[[], PlannedCall] | None" = None

    @property
    def called(self) -> Sequence[int]:
        """The ranks that it reaches."""
        ranks: Sequence[int] = self.recipients.called
        return ranks


# That of `change`, which imports this module.
Changes: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Sent:
    """A call that has been sent, with a reply from each of its ranks."""

    call: PlannedCall
    replies: list[Any]
    epoch: int


class Core:
    """The members of a group, and its calls. `now` is replaced as a whole, and read without a lock.

    `turn` protects the submission of one call to all of its workers, the calls that wait for the end of a change, and
    the replacement of `now`. Whoever holds it never waits, makes no other request, and runs no code of the user. A
    signal handler's own thread may hold it, so the end of a group begins without it.
    """

    is_owner: ClassVar[bool] = True  # whether this process has made the group

    def __init__(
        self,
        name: str,
        places: Sequence[Place],
        sharding: NamedSharding,
        *,
        policy: Restart,
        call_timeout_s: float | None = None,
        memory_limit: int = 0,
        remedy: str = "",
    ) -> None:
        self.name_prefix = name
        self.policy = policy
        self.call_timeout_s = call_timeout_s
        self.memory_limit = memory_limit
        self.worker_class: WorkerClass  # as it is described now; set before the first call
        self.changes: Changes = None  # set by the process that makes the group
        self.checks: list[Callable[[str, Sequence[int]], None]] = []  # of packages; see `extension`
        self.connection = _world.Connection(self)
        self.ending: bool = False
        self.now = GroupState(0, 0, sharding, tuple(Member(place, node_id=place.slot.node_id) for place in places))
        self.turn = _world.current.lock()
        self._remedy = remedy
        self._by_actor: dict[str, Member] = {}  # with replaced incarnations, whose results may still be fetched
        self._sending: int | None = None  # the thread that submits a call
        self._change_ends: Event | None = None  # while calls wait for a change
        # Calls of event loops, in order. While there are any, `_change_ends` is set, so that none overtakes them.
        self._queued: deque[tuple[PlannedCall, Future[Sent]]] = deque()

    def __repr__(self) -> str:
        size = len(self.now.members)
        state = f"{size} worker{'s' * (size != 1)}" if self.now.phase != "ended" else "shut down"
        return f"RayWorkerGroup({self.name_prefix!r}, {dict(self.now.sharding.shape)}, {state})"

    @property
    def is_there(self) -> bool:
        """Whether the workers have started, and the group has not ended."""
        return self.now.phase not in ("starting", "ended")

    @property
    def handles(self) -> list[Any]:
        """The actor of each worker, by rank."""
        return [member.handle for member in self.now.members] if self.is_there else []

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """A dict for each worker, by rank."""
        now = self.now
        return [describe_place(place, now.state_of(place.rank)) for place in (now.places if self.is_there else ())]

    @property
    def world_size(self) -> int:  # for the picture of the cluster
        return len(self.now.members)

    @property
    def restarts_all(self) -> bool:
        """Whether all workers restart together."""
        return self.policy.scope == "group"

    def check_alive(self) -> GroupState:
        """Return the state of a group that has not ended."""
        now = self.now
        if not self.is_there:
            raise self.ended_error()
        self.connection.check()
        return now

    def check_goes_on(self) -> None:
        """Raise if the group or its Ray ends, so that a change has to be given up."""
        if self.ending:
            raise self.ended_error()
        self.connection.check()

    def ended_error(self) -> WorkerGroupError:
        return WorkerGroupError(f"{self!r}: it has been shut down; make a new group")

    def find(self, actor_id: str) -> Member | None:
        """Return the worker of an actor, also after its replacement; None for an actor of another group."""
        return self._by_actor.get(actor_id)

    def member_of(self, reply: Any) -> Member:
        """Return the worker of this group that makes a reply."""
        return self._by_actor[replies.actor_of(reply)]

    def is_present(self, member: Member) -> bool:
        """Return whether a worker has not been replaced, and its rank has not left."""
        members = self.now.members
        return member.rank < len(members) and members[member.rank].actor_id == member.actor_id

    def is_lost(self, reply: Any) -> bool:
        """Return whether the worker that makes a reply is dead or has been replaced."""
        member = self.member_of(reply)
        return not (self.is_present(member) and self.now.members[member.rank].lost is None)

    def commit(self, state: GroupState) -> None:
        """Begin an epoch with other members; the only way in which members are replaced."""
        with self.turn:
            if self.ending:
                raise self.ended_error()
            self._note_members(state)
            self.now = replace(state, version=self.now.version + 1)

    def _note_members(self, state: GroupState) -> None:
        """Note the workers of the next epoch, and those that leave."""
        cause = f"its rank left the group, resized to {dict(state.sharding.shape)} in epoch {state.group_epoch}"
        for member in self.now.members[len(state.members) :]:
            self._by_actor[member.actor_id] = replace(member, lost=member.lost or member.failure("left", cause))
        self._by_actor.update((member.actor_id, member) for member in state.members)

    def latest_incarnations(self) -> dict[int, int]:
        """Return the latest incarnation of each rank that has ever started."""
        return {member.rank: member.incarnation for member in self._by_actor.values()}

    def note(
        self, lost: Iterable[tuple[Member, WorkerFailure]], *, override: bool = False, breaks: bool = False
    ) -> list[WorkerFailure]:
        """Record losses of workers that have not been replaced; return the report that each has now.

        The first report counts, unless `override` says that a restart has failed. With `breaks` the group is broken.
        """
        with self.turn:
            members, reports = list(self.now.members), []
            for member, failure in lost:
                now = self._by_actor.get(member.actor_id, member)
                if self.is_present(member):
                    now = members[member.rank]
                    if override or now.lost is None:
                        # What it counts may be more than now.
                        now = members[member.rank] = replace(member if override else now, lost=failure)
                reports.append(now.lost or failure)
            self.advance(members=tuple(members), phase="broken" if breaks else self.now.phase)
            return reports

    def advance(self, **changes: Any) -> None:
        """Replace some fields of the state."""
        with self.turn:
            self.now = replace(self.now, version=self.now.version + 1, **changes)

    def end(self) -> None:
        with self.turn:
            self.ending = True
            self.advance(phase="ended")
        self.refuse_waiting()

    # Calls.

    def renew(self, at_least: int = 0) -> None:
        """Bring the members of another process's group up to date, to an epoch if one is given."""

    def check_retries(self, retries: int) -> None:
        if retries and not self.policy.on_failure:
            raise ValueError(f"retries={retries} needs a group with restart=Restart(on_failure=True)")

    def send(self, call: PlannedCall, until: Deadline | None = None) -> Sent:
        """Restart lost workers if that is due, and send a call in its turn; wait for both until its deadline."""
        until = call.deadline if until is None else until
        while True:
            outcome = self._try(call)
            if isinstance(outcome, Sent):
                return outcome
            if isinstance(outcome, list):
                # A restart may take longer than this call may wait, and runs to its end.
                is_over = self.changes.restart_lost().wait(until)
            else:
                is_over = wait_for_event(outcome, until)
            if not is_over:
                raise self.unsent_error(call)

    def send_or_queue(self, call: PlannedCall) -> "Sent | Future[Sent]":
        """Send a call of an event loop; if it has to wait, return a future, and send it when the change has ended."""
        later: Future[Sent] = Future()
        with self.turn:
            outcome = self._try(call)
            if isinstance(outcome, Sent):
                return outcome
            self._queued.append((call, later))
            self._change_ends = self._change_ends or _world.current.event()
        if isinstance(outcome, list):
            try:
                self.changes.restart_lost()
            except BaseException as error:
                self.end_change(error)
                raise
        return later

    def begin_change(self) -> None:
        """Let no further call pass; one that is being submitted is submitted to its end."""
        with self.turn:
            self._change_ends = self._change_ends or _world.current.event()

    def end_change(self, error: BaseException | None = None) -> bool:
        """Send the calls of event loops, and let others pass; return whether calls still wait for a restart.

        Calls that cannot be sent get the error of the change, if it has failed.
        """
        settled: list[Callable[[], None]] = []
        with self.turn:
            ends, self._change_ends = self._change_ends, None
            while self._queued:
                call, later = self._queued.popleft()
                if not later.running() and not later.set_running_or_notify_cancel():
                    continue
                try:
                    if call.deadline.passed:
                        raise self.unsent_error(call)
                    outcome = self._submit(call)
                except Exception as failure:  # noqa: BLE001  raised to the caller
                    settled.append(partial(later.set_exception, failure))
                    continue
                if isinstance(outcome, Sent):
                    settled.append(partial(later.set_result, outcome))
                elif error is not None or self.ending:
                    settled.append(partial(later.set_exception, error or self.ended_error()))
                else:
                    self._queued.appendleft((call, later))
                    self._change_ends = _world.current.event()
                    break
        if ends is not None:
            ends.set()
        for settle in settled:  # without the lock, because what waits for them may act
            settle()
        return bool(self._queued)

    def refuse_waiting(self) -> None:
        """Wake all that wait, because the group ends; without the lock, which a handler's own thread may hold."""
        ends, self._change_ends = self._change_ends, None
        if ends is not None:
            ends.set()
        while self._queued:
            _, later = self._queued.popleft()
            if later.running() or later.set_running_or_notify_cancel():
                later.set_exception(self.ended_error())

    def _try(self, call: PlannedCall) -> "Sent | list[WorkerFailure] | Event":
        """Send a call in its turn, or return the lost workers that it needs, or the event of the end of the change."""
        me = _world.current.thread()
        is_changing = self._change_ends is not None and not call.is_hook
        if self._sending == me or (is_changing and self.changes is not None and self.changes.runs_here()):
            raise WorkerGroupError(
                "A signal handler or a finalizer made a call while its thread was sending another call of the same "
                "group, or was changing the group. Set a flag in the handler, and make the call in the thread's own "
                "code."
            )
        with self.turn:
            if self._change_ends is not None and not call.is_hook:
                return self._change_ends
            try:
                self._sending = me
                return self._submit(call)
            finally:
                self._sending = None

    def admit(self, call: PlannedCall) -> GroupState | list[WorkerFailure]:
        """Return the members for a call that may be sent; or the lost workers that it has to wait for."""
        now, called = self.now, call.called
        if now.phase == "ended":
            raise self.ended_error()
        self.connection.check()
        if call.sharding is not now.sharding and (call.sharding is not None or not now.has(called)):
            raise StaleGroupError(
                f"{call.method.name!r} was not sent: the group has been resized since the call was made, and is "
                f"{dict(now.sharding.shape)}. Make the call again.",
                now.group_epoch,
            )
        for check in () if call.is_hook else list(self.checks):
            check(call.method.name, called)
        if now.lost:
            # The methods that a change runs wait for their own workers only.
            together = not call.is_hook and (now.phase == "broken" or (self.policy.on_failure and self.restarts_all))
            if blocking := [failure for failure in now.lost.values() if together or failure.rank in called]:
                if call.is_hook or not self.policy.on_failure:
                    raise self.failure_error(blocking)
                return blocking
        return now

    def _submit(self, call: PlannedCall) -> Sent | list[WorkerFailure]:
        """Send a call, planned again if the size of the group has changed since; the caller holds `turn`."""
        try:
            now = self.admit(call)
        except StaleGroupError:
            if call.replan is None:
                raise
            call = call.replan()
            now = self.admit(call)
        if isinstance(now, list):
            return now
        handles = [now.members[rank].handle for rank in call.called]
        return Sent(call, replies.submit(handles, call.requests), now.group_epoch)

    # Errors.

    def failure_error(self, lost: Sequence[WorkerFailure]) -> WorkerFailureError | StaleGroupError:
        """Return the error that reports losses, with what its user can do about them."""
        remedy = self._remedy or self._explain_restart([failure.rank for failure in lost])
        if self.ending:
            remedy = "The group has been shut down. Create a new group."
        elif any(failure.kind == "shut-down" for failure in lost):
            remedy = self._remedy or CLUSTER_GONE
        elif self.now.phase == "broken" and not self.policy.on_failure:
            remedy = BROKEN
        return WorkerFailureError(tuple(lost), remedy)

    def explain_limit(self, ranks: Iterable[int]) -> str:
        """Return why these ranks cannot be restarted any more; an empty text if they can."""
        limit, now = self.policy.max_restarts, self.now
        each = {f"rank {rank}": now.members[rank].restarts for rank in ranks}
        counts = {"the group": now.restarts} if self.restarts_all else each
        at_limit = [name for name, count in counts.items() if count >= limit]
        if not at_limit:
            return ""
        return (
            f"{', '.join(at_limit)} has been restarted max_restarts={limit} times, which is the limit. Look at the "
            "logs of these workers, then create a new group, with a larger max_restarts if such losses are expected."
        )

    def _explain_restart(self, ranks: Collection[int]) -> str:
        """Return what a user can do about these lost ranks; an empty text for the default advice."""
        reason = self.explain_limit(rank for rank in ranks if rank < len(self.now.members))
        if reason or not self.policy.on_failure:
            return reason
        scope = ", and all others with them" if self.restarts_all else ' (ranks with collectives need scope="group")'
        return f"The next call that needs these ranks starts them again{scope}. Repeat this call. {STATE}"

    def unsent_error(self, call: PlannedCall) -> CallTimeoutError:
        ranks = self.now.restarting
        what = f"restart of rank(s) {', '.join(map(str, ranks))}" if ranks else "restart or a resize"
        reason = f"A {what} continues, or is about to begin. Make the call again, with a longer timeout."
        waited_s = _world.current.now() - call.began
        return CallTimeoutError(call.method.name, waited_s, len(call.called), (), reason)


def find_core(group: object) -> Core:
    """Return the core of a group that this process has made."""
    core = getattr(group, "_core", None)
    if not isinstance(core, Core) or not core.is_owner:
        raise TypeError(f"This needs a RayWorkerGroup, got {group!r}")
    return core
