# SPDX-License-Identifier: Apache-2.0
"""One side of a link: the ends in the workers of a group, what is known of them, and requests to them."""

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from fairlead_workergroup import CallTimeoutError, Outcome, RayWorkerGroup, WorkerFailureError, WorkerGroupError
from fairlead_workergroup.extension import Member, Site

from ._remote.end import End
from ._remote.entry import serve
from ._remote.replies import Committed
from .exceptions import Role, State

Requests = dict[Member, Any]


@functools.cache
def pickled(function: Callable[..., Any]) -> bytes:
    """Return a function as it travels to workers."""
    return bytes(ray.cloudpickle.dumps(function))


@dataclass
class EndState:
    """The end in one worker, as the driver knows it."""

    process: tuple[int, int]  # the worker's; a restarted rank has another one
    number: int = 0  # of the last description; 0 if there is none
    described: list[Any] | None = None  # the tensors
    tasks_id: int = 0  # of the tasks that the end has
    installed: bool = False  # whether the worker has the code
    held: State = None  # the version of a target
    unconfirmed: Any = None  # the commit that a target may still be at


@dataclass
class Side:
    """The ends of a link in the workers of one group."""

    name: Literal["source", "target", "replica"]  # replicas are target ranks that send
    group: RayWorkerGroup  # the workers
    link: str  # the id of the link
    method: str | None  # the method that returns the tensors; None if tensors are applied by a method
    ends: dict[int, EndState] = field(default_factory=dict)  # what is known of the ends, by rank
    members: tuple[Member, ...] = ()  # the group's members at the last look
    restarting: tuple[int, ...] = ()  # the ranks that were being restarted then
    version: int = -1  # of the group's state at the last look
    is_closed: bool = False  # whether the ends have been told to drop everything
    _code: Any = None
    _lock: Any = field(default_factory=threading.Lock)  # `versions` of a link is for all threads

    @property
    def _site(self) -> Site:
        return Site(self.group)

    def look(self) -> None:
        """Look at the members of a group that has not ended; forget the ends of processes that are gone."""
        with self._lock:
            now = self._site.state()
            if now.version != self.version:
                known, self.members, self.restarting = self.ends, now.members, now.restarting
                self.ends = {
                    member.rank: known[member.rank]
                    if member.rank in known and known[member.rank].process == member.key
                    else EndState(member.key)
                    for member in now.members
                }
                self.version = now.version

    @property
    def role(self) -> Role:
        """The side to which the workers belong, for people: target ranks that send are of the target."""
        return "source" if self.name == "source" else "target"

    @property
    def lost(self) -> dict[int, str]:
        """Why the lost members were lost."""
        return {
            member.rank: f"{member.lost.kind}: {member.lost.cause}"
            + "; it is being restarted" * (member.rank in self.restarting)
            for member in self.members
            if member.lost is not None
        }

    @property
    def live(self) -> list[int]:
        """The ranks that are not lost."""
        return [member.rank for member in self.members if member.lost is None]

    @property
    def nodes(self) -> list[str]:
        """The node of each rank."""
        return [member.node_id for member in self.members]

    @property
    def names(self) -> set[str]:
        """The tensors that any rank has described."""
        return {tensor[0] for end in self.ends.values() for tensor in end.described or ()}

    @property
    def is_used(self) -> bool:
        """Whether workers may hold something for the link: it has asked them, and the group has not ended."""
        try:
            self._site.state()
        except WorkerGroupError:
            return False
        return bool(self.ends) and not self.is_closed

    def ask(
        self,
        ranks: Iterable[int],
        operation: str,
        arguments: Callable[[int], tuple[Any, ...]],
        *,
        alone_s: float | None = None,
        first: tuple[Any, ...] | None = None,
    ) -> Requests:
        """Send an operation to the ends of some ranks; make the ends that are missing.

        With `alone_s` it runs while no method of the worker does; `first` is an operation before that wait.
        """
        key, name = (self.link, self.name), f"fairlead_transfer {operation}"
        given = {self.members[rank]: (key, self._code_for(rank), operation, *arguments(rank)) for rank in ranks}
        before = None if first is None else (key, None, *first)
        return self._site.send(name, pickled(serve), given, alone_s=alone_s, first=before)

    def _code_for(self, rank: int) -> Any:
        """Return a reference to the code of an end; None if the worker has it."""
        if self.ends[rank].installed:
            return None
        if self._code is None:
            self._code = ray.put(ray.cloudpickle.dumps(End))
        return self._code

    def wait(self, requests: Requests, timeout_s: float, *, all_of_them: bool = False) -> dict[int, Outcome]:
        """Wait for replies, as `Site.collect` does."""
        replies = self._site.collect(requests, timeout_s, all_of_them=all_of_them)
        for member in requests:
            reply, end = replies.get(member.rank), self.ends[member.rank]
            if reply is not None and reply.error is None and end.process == member.key:
                end.installed = True
        return replies

    def cancel(self, requests: Requests, replies: Mapping[int, Outcome]) -> None:
        """Keep the requests without a reply from starting."""
        self._site.cancel({who: ref for who, ref in requests.items() if is_late(replies.get(who.rank))})

    def release(self, epoch: int, ranks: Collection[int] | None = None) -> None:
        """Have the living ends, or some of them, drop the tensors of an attempt, without waiting for it."""
        chosen = [rank for rank in self.live if ranks is None or rank in ranks]
        self.ask(chosen, "release", lambda rank: (epoch,))

    def close(self) -> None:
        """Have the ends drop everything, without waiting for it. Nothing if the group has been shut down."""
        try:
            self.look()
        except WorkerGroupError:
            return
        self.ask(self.live, "close", lambda rank: ())
        self.is_closed = True


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
            except ray.exceptions.RayError:  # the group will know that the worker is lost
                reply = Committed("missing")
            if end.unconfirmed is ref:  # no other thread has noted it
                end.unconfirmed = None
                self.note(end, reply)
        present = {member.rank for member in members if member.lost is None and member.rank in ends}
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


def is_late(reply: Outcome | None) -> bool:
    """Return whether a request has no reply, or none that came by the deadline."""
    return reply is None or isinstance(reply.error, CallTimeoutError)


def is_lost(reply: Outcome) -> bool:
    """Return whether the worker of a request was lost."""
    return isinstance(reply.error, WorkerFailureError)


def describe_reply(reply: Outcome) -> str:
    """Return why a request has failed."""
    error = reply.error
    if isinstance(error, WorkerFailureError):
        own = [failure for failure in error.failures if failure.rank == reply.rank]
        return "; ".join(f"{failure.kind}: {failure.cause}" for failure in own or error.failures)
    if isinstance(error, CallTimeoutError):
        running = [worker for worker in error.late if worker.rank == reply.rank and worker.method]
        doing = "".join(f" It is in {worker.method!r} for {worker.running_s:.1f} s." for worker in running)
        return f"it did not reply by the deadline.{doing}"
    return f"{type(error).__name__}: {error}"


def first_error(replies: Mapping[int, Outcome]) -> BaseException | None:
    """Return the first error that a worker has raised."""
    raised = (reply.error for reply in replies.values() if not is_late(reply) and not is_lost(reply))
    return next((error for error in raised if error is not None), None)
