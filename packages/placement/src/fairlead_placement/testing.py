# SPDX-License-Identifier: Apache-2.0
"""For tests of code that uses Ray: nothing is lost or left behind."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import ray
from ray.util.placement_group import placement_group_table

from ._nodes.agent import AGENT_NAME_PREFIX, NodeAgent, known_agents
from ._ray_private import free_per_node, live_actors
from .exceptions import PlacementError

__all__ = ["assert_no_leaks"]

# Ray keeps its own accounts of these, and they move by themselves.
_IGNORED = ("memory", "object_store_memory")


@dataclass(frozen=True)
class _Snapshot:
    """What is in use on a cluster, as sets of lines that can be compared and shown."""

    free: frozenset[str]
    actors: frozenset[str]
    groups: frozenset[str]
    ports: frozenset[str]


@contextlib.contextmanager
def assert_no_leaks(*, timeout_s: float = 20.0) -> Iterator[None]:
    """Assert that free resources, actors, placement groups and leased ports are afterwards as they were before.

    Ray gives some of them back with a delay, so they are looked at until they agree. Node agents stay: there is one
    for a job and a node, and it needs no resources. Without a running Ray there is nothing to assert.

    Args:
        timeout_s: seconds to wait until they agree.

    Raises:
        AssertionError: what is there now and was not before, or was and is not.
    """
    session = _session()
    deadline = time.monotonic() + timeout_s
    while session and not _settled() and time.monotonic() < deadline:
        time.sleep(0.02)
    before = _snapshot() if session else None
    yield
    if before is None or _session() != session:
        return  # nothing ran before, or that Ray has ended, and with it all it had
    deadline = time.monotonic() + timeout_s
    while (now := _snapshot()) != before:
        if time.monotonic() >= deadline:
            raise AssertionError(_difference(before, now, timeout_s))
        time.sleep(0.05)


def _session() -> str:
    return ray.get_runtime_context().get_session_name() if ray.is_initialized() else ""


def _settled() -> bool:
    """Whether the view of free resources has caught up with the placement groups that are placed.

    A placed bundle shows as a resource of its own on its node, of which actors take a thousandth each: never zero, so
    never absent.
    """
    free = free_per_node()
    return all(
        f"bundle_group_{index}_{group_id}" in free.get(node_id, {})
        for group_id, row in placement_group_table().items()
        if row["state"] == "CREATED"
        for index, node_id in row["bundles_to_node_id"].items()
    )


def _snapshot() -> _Snapshot:
    # A node's own resource carries its address; a node that is dead is not listed at all.
    free = {
        f"{node_id[:8]}: {amount:g} {name}"
        for node_id, resources in free_per_node().items()
        for name, amount in resources.items()
        if name not in _IGNORED and not name.startswith("node:")
    }
    return _Snapshot(
        free=frozenset(free),
        actors=frozenset(
            f"{actor.actor_id} {actor.class_name} {actor.name}"
            for actor in live_actors()
            if not actor.name.startswith(AGENT_NAME_PREFIX)
        ),
        groups=frozenset(
            f"{group_id} {row['name']}"
            for group_id, row in placement_group_table().items()
            if row["state"] != "REMOVED"
        ),
        ports=frozenset(f"{agent.node_id[:8]}: {port}" for agent in known_agents() for port in _leased(agent)),
    )


def _leased(agent: NodeAgent) -> list[int]:
    try:
        return agent.leased()
    except PlacementError:
        # Its node is dying and Ray has not noticed: what it held is going. A node that lives is looked at again.
        return []


def _difference(before: _Snapshot, now: _Snapshot, waited: float) -> str:
    lines = [f"after {waited:g} s the cluster is not as it was:"]
    for name, what in (
        ("free", "free resource"),
        ("actors", "actor"),
        ("groups", "placement group"),
        ("ports", "leased port"),
    ):
        lines += [f"  new {what}: {one}" for one in sorted(getattr(now, name) - getattr(before, name))]
        lines += [f"  missing {what}: {one}" for one in sorted(getattr(before, name) - getattr(now, name))]
    return "\n".join(lines)
