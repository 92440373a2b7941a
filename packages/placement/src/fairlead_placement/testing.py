# SPDX-License-Identifier: Apache-2.0
"""Checks, in tests of code that uses Ray, that nothing is lost or left behind."""

import contextlib
import time
from collections.abc import Iterator

import ray
from ray.util.placement_group import placement_group_table

from ._nodes.agent_process import NodeAgent
from ._nodes.head import wait_until
from ._nodes.ports import leased_ports
from ._ray_private import free_per_node, live_actors
from ._reserve.groups import are_shown

__all__ = ["assert_no_leaks"]

# Ray accounts for these itself, and the amounts change at any time.
_IGNORED = ("memory", "object_store_memory")


@contextlib.contextmanager
def assert_no_leaks(*, timeout_s: float = 20.0) -> Iterator[None]:
    """Assert that free resources, actors, placement groups and leased ports are the same after a block as before it.

    Ray returns some of them with a delay, so they are compared until they agree. Leased ports are those of this
    process. Node agents are left out. Without a running Ray nothing is asserted.

    Args:
        timeout_s: seconds to wait until they agree.

    Raises:
        AssertionError: something is new or missing. The message lists it.
    """
    session = _session()
    if session:
        wait_until(lambda: are_shown(_live_groups().keys()), time.monotonic() + timeout_s)
    before = _snapshot() if session else {}
    yield
    if not session or _session() != session:
        return  # Ray did not run before, or it has ended, and with it everything it had
    deadline = time.monotonic() + timeout_s
    while (now := _snapshot()) != before:
        if time.monotonic() >= deadline:
            lines = [f"after {timeout_s:g} s the cluster is not as it was:"]
            for kind in before:
                lines += [f"  new {kind}: {line}" for line in sorted(now[kind] - before[kind])]
                lines += [f"  missing {kind}: {line}" for line in sorted(before[kind] - now[kind])]
            raise AssertionError("\n".join(lines))
        time.sleep(0.05)


def _session() -> str:
    return ray.get_runtime_context().get_session_name() if ray.is_initialized() else ""


def _live_groups() -> dict[str, str]:
    """Return the names of the groups that are not removed, by id."""
    return {group_id: row["name"] for group_id, row in placement_group_table().items() if row["state"] != "REMOVED"}


def _snapshot() -> dict[str, frozenset[str]]:
    """Return what is in use on the cluster, by kind, as lines that can be compared and shown."""
    # The name of a node's own resource holds its address. Dead nodes are not listed.
    free = {
        f"{node_id[:8]}: {amount:g} {name}"
        for node_id, resources in free_per_node().items()
        for name, amount in resources.items()
        if name not in _IGNORED and not name.startswith("node:")
    }
    return {
        "free resource": frozenset(free),
        "actor": frozenset(
            f"{actor.actor_id} {actor.class_name} {actor.name}"
            for actor in live_actors()
            if actor.class_name != NodeAgent.__name__
        ),
        "placement group": frozenset(f"{group_id} {name}" for group_id, name in _live_groups().items()),
        "leased port": frozenset(f"{lease.node_id[:8]}: {lease.port}" for lease in leased_ports()),
    }
