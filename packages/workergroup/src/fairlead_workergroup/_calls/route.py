# SPDX-License-Identifier: Apache-2.0
"""The use of a transport by a group: it begins and ends between two calls."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import ray

from fairlead_placement import PortLease

from .._lifecycle.resources import Resources
from .._membership.judge import Evidence
from .._membership.machine import Membership
from .._membership.model import Snapshot
from .._membership.operations import Route
from .._membership.roster import Gate, Roster
from .._observe.evidence import evidence_of
from .._observe.publications import ANSWER_S
from .._observe.query import late_workers
from .._ray_private import refuse_methods
from .._transport.messages import Transport
from .._world import NEVER, Deadline
from ..exceptions import LaneError, LateWorker
from .sender import Sender


class Site:
    """The group of a transport, as far as it needs it, without keeping the group alive.

    Attributes:
        overlaps: whether the async methods of the workers overlap.
        lease_port: leases a port of this node.
    """

    def __init__(self, roster: Roster, lease_port: Callable[[], PortLease], *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.lease_port = lease_port
        self._roster = roster

    def __repr__(self) -> str:
        return repr(self._roster)

    @property
    def is_connected(self) -> bool:
        """Whether the Ray of the group is still there."""
        return self._roster.connected

    @property
    def is_ending(self) -> bool:
        """Whether the group is being shut down."""
        return self._roster.ending

    def members(self) -> Snapshot:
        """Return the members of the group now."""
        return self._roster.now

    def report_end(self, actor_id: str, error: BaseException, what: str) -> None:
        """Tell the judge of death that the connection with a worker has ended with an error.

        The end of a connection alone does not say that the process is gone.
        """
        worker = self._roster.find(actor_id)
        if worker is not None:
            told = evidence_of(error) or Evidence("transport", "silent", text=f"{what}: {error}")
            self._roster.judge.tell(worker, told)

    def late_workers(self, ranks: Iterable[int]) -> tuple[LateWorker, ...]:
        """Return what these ranks are doing, without those that have left the group."""
        now = self.members()
        return late_workers([now[rank].process for rank in ranks if now.has([rank])])


@contextlib.contextmanager
def use_transport(
    sender: Sender, membership: Membership, resources: Resources, make: Callable[[Site], Transport], timeout_s: float
) -> Iterator[None]:
    """Send the calls of a group by a transport, which is made unless the group uses one."""
    transport = _enter(sender, membership, resources, make, timeout_s)
    try:
        yield
    except BaseException:
        _leave(sender, membership, resources, transport, None)  # workers may hang, and the error does not wait for them
        raise
    _leave(sender, membership, resources, transport, timeout_s)


def _enter(
    sender: Sender, membership: Membership, resources: Resources, make: Callable[[Site], Transport], timeout_s: float
) -> Transport:
    deadline, used, is_first = Deadline.after(timeout_s), list[Transport](), list[bool]()
    sender.roster.check_alive()

    def lease_port() -> PortLease:
        node_id, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return resources.lease_port(replace(sender.roster.now.members[0].slot, node_id=node_id, node_ip=address))

    def use(gate: Gate) -> None:
        is_first.append(sender.transport is None)
        if sender.transport is None:
            made = make(Site(sender.roster, lease_port, overlaps=sender.described.worker_class.concurrent))
            gate.run(lambda: _install(sender, made), NEVER)
        else:
            made = sender.transport
        sender.users_of_transport += 1
        used.append(made)
        if is_first[0]:
            _publish(sender, resources)

    opening = Route("The opening of a lane", use)
    try:
        change = membership.begin(opening)
        if not change.wait(deadline):
            if membership.withdraw(opening):
                reason = membership.describe_wait("Open the lane again, with a longer timeout.")
                raise LaneError(f"The lane did not open within {timeout_s:g} s. {reason}")
            change.wait()
        if is_first[0]:
            used[0].open(deadline.left() or 0.0)
            _await_handles(sender, resources, deadline)
    except BaseException:
        membership.give_up(opening)
        if used:
            _leave(sender, membership, resources, used[0], None)
        raise
    return used[0]


def _install(sender: Sender, transport: Transport | None) -> None:
    """Let later calls go by a transport, or by Ray; between two calls."""
    sender.transport = transport
    sender.roster.detour = None if transport is None else transport.detour


def _leave(
    sender: Sender, membership: Membership, resources: Resources, transport: Transport, timeout_s: float | None
) -> None:
    """Close the transport if it has no other user; without a timeout, do not wait until it has closed itself."""
    deadline, is_last = Deadline.after(timeout_s), list[bool]()

    def stop() -> None:
        _install(sender, None)
        transport.stop()

    def give_up(gate: Gate) -> None:
        sender.users_of_transport -= 1
        is_last.append(not sender.users_of_transport)
        if is_last[0]:
            gate.run(stop, NEVER)
            if sender.roster.connected and not sender.roster.ending:
                _publish(sender, resources)

    if sender.roster.ending or not sender.roster.connected:  # nothing changes any more
        give_up(membership.gate)
    else:
        change = membership.begin(Route("The end of a lane", give_up))
        if timeout_s is None:
            return
        if not change.wait(deadline):
            reason = membership.describe_wait("The lane closes by itself after that.")
            raise LaneError(f"The lane did not close within {timeout_s:g} s. {reason}")
    if is_last[0] and timeout_s is not None:
        transport.close(deadline.left() or 0.0)
        _await_handles(sender, resources, deadline)


def _publish(sender: Sender, resources: Resources) -> None:
    """Publish whether a lane is open."""
    if resources.registration is not None:
        resources.registration.lane = sender.transport is not None
        resources.registration.publish()


def _await_handles(sender: Sender, resources: Resources, deadline: Deadline) -> None:
    """Wait until the handles of other processes know whether a lane is open: a call at once would wait for its end."""
    if resources.registration is not None and sender.roster.connected and not sender.roster.ending:
        resources.registration.await_handles(min(ANSWER_S, deadline.left() or 0.0))


def serving_handles(roster: Roster) -> list[Any]:
    """Return the handles of a group, which refuse to be called while another transport than Ray carries its calls."""
    handles = roster.handles
    if roster.detour is None:
        return handles

    def refuse(method: str) -> NoReturn:
        raise LaneError(
            f"The workers of {roster.name_prefix!r} serve a lane, so a Ray call of {method!r} would wait until it "
            f"closes. Use group.call({method!r}, ...), or call the actor outside of `with group.lane():`."
        )

    return [refuse_methods(handle, refuse) for handle in handles]
