# SPDX-License-Identifier: Apache-2.0
"""The opening and closing of the lane of a group."""

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import ray

from fairlead_placement import Slot

from .._deadline import NEVER, Deadline
from .._lane.lane import Lane
from .._lane.router import Router
from .._lifecycle.resources import Resources
from .._membership.gate import Gate
from .._membership.operations import Route
from .._membership.roster import Roster
from .._ray_private import refuse_methods
from ..exceptions import LaneError
from .sender import Sender


@contextlib.contextmanager
def open_lane(sender: Sender, resources: Resources, timeout_s: float) -> Iterator[None]:
    """Send the calls of a group by a lane; see `RayWorkerGroup.lane`."""
    lane = _enter(sender, resources, timeout_s)
    try:
        yield
    except BaseException:
        _leave(sender, resources, lane, None)  # workers may hang, and the error does not wait for them
        raise
    _leave(sender, resources, lane, timeout_s)


def _enter(sender: Sender, resources: Resources, timeout_s: float) -> Lane:
    if importlib.util.find_spec("zmq") is None:
        raise LaneError(
            "A lane needs pyzmq, which is not installed here. Install fairlead-workergroup[lane], and pyzmq in the "
            "Python of the workers if they have one of their own."
        )
    deadline, used = Deadline.after(timeout_s), list[Lane]()
    now = sender.roster.check_alive()

    def use(gate: Gate) -> None:
        if sender.lane is None:
            lane = _make_lane(sender, resources, now.members[0].slot)
            gate.run(lambda: _install(sender, lane), NEVER)
        else:
            lane = sender.lane
            lane.holders += 1
        used.append(lane)

    opening = Route("The opening of a lane", use)
    try:
        change = sender.membership.begin(opening)
        if not change.wait(deadline):
            if sender.membership.withdraw(opening):
                reason = sender.membership.describe_wait("Open the lane again, with a longer timeout.")
                raise LaneError(f"The lane did not open within {timeout_s:g} s. {reason}")
            change.wait()
        if used[0].holders == 1:
            used[0].open(deadline.left() or 0.0)
            _publish(sender, resources)
    except BaseException:
        sender.membership.give_up(opening)
        if used:
            _leave(sender, resources, used[0], None)
        raise
    return used[0]


def _install(sender: Sender, lane: Lane | None) -> None:
    """Let later calls go by a lane, or by Ray; between two calls."""
    sender.lane = lane
    sender.roster.detour = None if lane is None else lane.detour


def _leave(sender: Sender, resources: Resources, lane: Lane, timeout_s: float | None) -> None:
    """Close the lane if nobody else uses it; without a timeout, do not wait until it has closed itself."""
    deadline, is_last = Deadline.after(timeout_s), list[bool]()

    def stop() -> None:
        _install(sender, None)
        lane.stop()

    def give_up(gate: Gate) -> None:
        lane.holders -= 1
        is_last.append(not lane.holders)
        if is_last[0]:
            gate.run(stop, NEVER)
            if sender.roster.connected and not sender.roster.ending:
                _publish(sender, resources)

    if sender.roster.ending or not sender.roster.connected:  # nothing changes any more
        give_up(sender.membership.gate)
    else:
        change = sender.membership.begin(Route("The end of a lane", give_up))
        if timeout_s is None:
            return
        if not change.wait(deadline):
            reason = sender.membership.describe_wait("The lane closes by itself after that.")
            raise LaneError(f"The lane did not close within {timeout_s:g} s. {reason}")
    if is_last[0] and timeout_s is not None:
        lane.close(deadline.left() or 0.0)


def _make_lane(sender: Sender, resources: Resources, slot: Slot) -> Lane:
    """Return a lane with a socket at a leased port of this node."""
    here = replace(slot, node_id=ray.get_runtime_context().get_node_id(), node_ip=ray.util.get_node_ip_address())
    lease = resources.lease_port(here)
    try:
        overlaps, router = sender.launcher.worker_class.concurrent, Router(lease.address, lease.port)
        return Lane(sender.roster, router, lease.release, node_id=here.node_id, overlaps=overlaps)
    except BaseException:
        lease.release()
        raise


def _publish(sender: Sender, resources: Resources) -> None:
    """Publish whether a lane is open."""
    if resources.registration is not None:
        resources.registration.lane = sender.lane is not None
        resources.registration.publish()


def serving_handles(roster: Roster) -> list[Any]:
    """Return the handles of a group, which refuse to be called while the workers serve a lane."""
    handles = roster.handles
    if roster.detour is None:
        return handles

    def refuse(method: str) -> NoReturn:
        raise LaneError(
            f"The workers of {roster.name_prefix!r} serve a lane, so a Ray call of {method!r} would wait until it "
            f"closes. Use group.call({method!r}, ...), or call the actor outside of `with group.lane():`."
        )

    return [refuse_methods(handle, refuse) for handle in handles]
