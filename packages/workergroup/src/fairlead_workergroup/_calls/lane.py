# SPDX-License-Identifier: Apache-2.0
"""The opening and closing of the lane of a group."""

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import ray

from fairlead_placement import Slot
from fairlead_placement.spi import never_connect

from .._deadline import Deadline
from .._lane.lane import Lane
from .._lane.router import Router
from .._lifecycle.resources import Resources
from .._membership.roster import Roster
from .._ray_private import refuse_methods
from ..exceptions import LaneError
from .sender import Sender

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_lane(sender: Sender, resources: Resources, timeout_s: float) -> Iterator[None]:
    """Send the calls of a group by a lane; see `RayWorkerGroup.lane`."""
    lane = _enter(sender, resources, timeout_s)
    try:
        yield
    except BaseException as error:
        try:
            _leave(sender, resources, lane, timeout_s)
        except LaneError as late:
            error.add_note(f"besides: {late}")
        raise
    _leave(sender, resources, lane, timeout_s)


def _enter(sender: Sender, resources: Resources, timeout_s: float) -> Lane:
    if importlib.util.find_spec("zmq") is None:
        raise LaneError(
            "A lane needs pyzmq, which is not installed here. Install fairlead-workergroup[lane], and pyzmq in the "
            "Python of the workers if they have one of their own."
        )
    deadline = Deadline.after(timeout_s)
    with _take_turn(sender, deadline, timeout_s):
        now = sender.roster.check_alive()
        lane = sender.lane
        if lane is not None:
            lane.holders += 1
            return lane
        sender.lane = lane = _make_lane(sender, resources, now.members[0].slot)
        sender.roster.detour = lane.detour
    try:
        lane.open(deadline.left() or 0.0)
        with _take_turn(sender, deadline, timeout_s):
            _publish(sender, resources)
    except BaseException:
        with contextlib.suppress(LaneError):
            _leave(sender, resources, lane, 0.0)
        raise
    return lane


def _leave(sender: Sender, resources: Resources, lane: Lane, timeout_s: float) -> None:
    deadline = Deadline.after(timeout_s)
    if not _acquire_turn(sender, deadline):
        work = partial(_give_up_later, sender, resources, lane)
        threading.Thread(target=work, name="fairlead-lane-end", daemon=True).start()
        reason = sender.restarter.describe_wait("The lane closes by itself after that.")
        raise LaneError(f"The lane did not close within {timeout_s:g} s. {reason}")
    try:
        is_last = _give_up(sender, resources, lane)
    finally:
        sender.restarter.turn.release()
    if is_last:
        lane.close(deadline.left() or 0.0)


def _give_up(sender: Sender, resources: Resources, lane: Lane) -> bool:
    """End the use of a lane by one context, with the turn held; return whether that ends the lane."""
    lane.holders -= 1
    if lane.holders:
        return False
    sender.lane = sender.roster.detour = None
    lane.stop()
    if sender.roster.connected and not sender.roster.ending:
        _publish(sender, resources)
    return True


def _give_up_later(sender: Sender, resources: Resources, lane: Lane) -> None:
    """End the use of a lane when other threads let go of the turn; the lane closes itself afterwards."""
    never_connect()
    with sender.restarter.turn:
        try:
            _give_up(sender, resources, lane)
        except Exception as error:  # noqa: BLE001  nobody waits for this thread
            logger.warning("The end of a lane could not be published: %r", error)


@contextlib.contextmanager
def _take_turn(sender: Sender, deadline: Deadline, timeout_s: float) -> Iterator[None]:
    """Keep other threads from sending calls and restarting workers while this one opens a lane."""
    if not _acquire_turn(sender, deadline):
        reason = sender.restarter.describe_wait("Open the lane again, with a longer timeout.")
        raise LaneError(f"The lane did not open within {timeout_s:g} s. {reason}")
    try:
        yield
    finally:
        sender.restarter.turn.release()


def _acquire_turn(sender: Sender, deadline: Deadline) -> bool:
    return sender.restarter.turn.acquire(timeout=deadline.left(at_most=threading.TIMEOUT_MAX) or 0.0)


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
    """Publish whether a lane is open, with the turn held: another thread may have opened or closed one meanwhile."""
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
