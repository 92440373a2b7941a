# SPDX-License-Identifier: Apache-2.0
"""Pretended placement: claims of slots, leases of ports, and the creation of actors in slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlead_placement import PlacementError, ResourceInsufficientError, Slot

from .ray import PretendedRay
from .seam import Deadline, late_error, start_error

FIRST_PORT = 20_000
# How long a lease waits for the agent of its node, and how often a wait for constructors looks whether it goes on.
ANSWER_S = 60.0
LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class Held:
    """A claim of slots, or a lease of a port; the attributes of both, as far as groups use them."""

    held: set["Held"]
    keys: frozenset[tuple[str, int]] = frozenset()
    address: str = ""
    port: int = 0
    node_id: str = ""

    def release(self, *, timeout_s: float = 0.0) -> None:
        """Give it back. Can be repeated."""
        self.held.discard(self)


@dataclass(eq=False)
class PretendedPlacement:
    """The functions of placement and of a start that groups use.

    Attributes:
        claims: the claims that have not been released.
        leases: the leases of ports that have not been released.
    """

    ray: PretendedRay
    claims: set[Held] = field(default_factory=set)
    leases: set[Held] = field(default_factory=set)
    _ports: int = FIRST_PORT

    def claim_slots(self, slots: Sequence[Slot], holder: str, *, group: object | None = None) -> Held:
        """Claim slots, or none of them."""
        self.ray.world.point(f"claims {len(slots)} slots")
        for slot in slots:
            self.ray.check_node(slot.node_id, "claims a slot")
            if sum(slot.key in claim.keys for claim in self.claims) >= slot.capacity:
                raise ResourceInsufficientError(f"{holder!r} cannot run in bundle {slot.key}, which is full")
        claim = Held(self.claims, frozenset(slot.key for slot in slots))
        self.claims.add(claim)
        return claim

    def lease_ports(self, slots: Sequence[Slot], **_: Any) -> tuple[tuple[Held], ...]:
        """Lease a port on the node of the only slot."""
        (slot,) = slots
        node = self.ray.nodes[slot.node_id]
        self.ray.world.wait_for("leases a port", lambda: node.is_alive and not node.is_silent, ANSWER_S)
        if not node.is_alive:
            raise PlacementError("the node of a port does not answer")
        self._ports += 1
        lease = Held(self.leases, address=node.ip, port=self._ports, node_id=node.id)
        self.leases.add(lease)
        self.ray.world.after("has leased a port")
        return ((lease,),)

    def create_actors(
        self,
        plans: Sequence[Any],
        described: Any,
        names: Sequence[str],
        add: Callable[[Any, Any], None],
    ) -> None:
        """Create the actors of workers, as `provision.create_actors` does."""
        head = self.ray.head
        for plan in plans:
            self.ray.world.wait_for("asks the head to create a worker", lambda: not head.is_silent)
            add(plan, self.ray.create(plan.place.slot.node_id))

    def wait_started(
        self,
        started: Sequence[Any],
        members: Sequence[Any],
        *,
        until: Deadline,
        check: Callable[[], None],
        explain: Callable[[Any, Exception], Any],
        **_: Any,
    ) -> dict[int, Mapping[str, Any]]:
        """Wait until all constructors have finished, as `provision.wait_started` does."""
        pending = dict(zip(started, members, strict=True))
        while pending:
            left = until.left(at_most=LOOK_EVERY_S)
            ready, _rest = self.ray.world.wait(list(pending), num_returns=1, timeout=left)
            check()
            if not ready and until.passed:
                late = [*pending.values()]
                raise late_error(late, [None] * len(late), len(started), until.limit_s or 0.0)
            for ref in ready:
                member = pending.pop(ref)
                try:
                    ref.value()
                except Exception as error:
                    waiting = [other.rank for other in pending.values()]
                    done = len(started) - len(pending) - 1
                    raise start_error(error, member, done, waiting, explain(member, error)) from error
        return {member.rank: ref.value() for member, ref in zip(members, started, strict=True)}
