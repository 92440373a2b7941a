# SPDX-License-Identifier: Apache-2.0
"""The requests of groups to Ray's head (its GCS), each with a deadline: no other module reads the tables of the head.

Each raises `HeadTimeoutError` if the head does not answer within `REQUEST_S` or the `head_deadline` of the caller.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ray.util.placement_group import PlacementGroup, placement_group_table

from fairlead_placement import spi
from fairlead_placement.extension import Agent, ask_head, head_deadline

from .. import _ray_private

_T = TypeVar("_T")
# The head answers within milliseconds.
REQUEST_S = 10.0


def _ask(request: str, function: Callable[..., _T], *args: Any) -> _T:
    with head_deadline(REQUEST_S):
        return ask_head(request, function, *args)


def alive_nodes() -> frozenset[str]:
    """Return the nodes that are alive, including those that are draining."""
    return _ask("list the nodes", spi.alive_nodes)


def draining_nodes() -> frozenset[str]:
    """Return the nodes that are draining."""
    return frozenset(_ask("list the nodes that are draining", spi.drain_deadlines))


def find_agents() -> list[Agent]:
    """Return the node agents of all jobs."""
    return _ask("list the node agents", spi.find_agents)


def dead_actors() -> frozenset[str]:
    """Return the actors of this job that are dead."""
    return _ask("list the dead actors", _ray_private.dead_actors)


def actors_being_made() -> frozenset[str]:
    """Return the actors of this job that have been requested and not yet created."""
    return _ask("list the actors that are being created", _ray_private.actors_being_made)


def process_is_alive(worker_id: str) -> bool | None:
    """Return whether a process and its node are alive; None if that is unknown."""
    return _ask(f"look at process {worker_id[:8]}", spi.process_is_alive, worker_id)


def read_placement_group(group: PlacementGroup) -> Mapping[str, Any]:
    """Return Ray's row of a placement group."""
    return _ask("look at a placement group", placement_group_table, group)
