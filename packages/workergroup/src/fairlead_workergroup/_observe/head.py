# SPDX-License-Identifier: Apache-2.0
"""The requests of groups to Ray's head (its GCS), each with a deadline: no other module reads the tables of the head.

Each raises `HeadTimeoutError` if the head does not answer within `REQUEST_S` or the `head_deadline` of the caller.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ray.util.placement_group import PlacementGroup, placement_group_table

from fairlead_placement import extension
from fairlead_placement.extension import Board, ask_head, head_deadline

from .. import _ray_private

_T = TypeVar("_T")
# The head answers within milliseconds.
REQUEST_S = 10.0


def _ask(request: str, function: Callable[..., _T], *args: Any) -> _T:
    with head_deadline(REQUEST_S):
        return ask_head(request, function, *args)


def alive_nodes() -> frozenset[str]:
    """Return the nodes that are alive, including those that are draining."""
    return _ask("list the nodes", extension.alive_nodes)


def draining_nodes() -> frozenset[str]:
    """Return the nodes that are draining."""
    return frozenset(_ask("list the nodes that are draining", extension.drain_deadlines))


def find_boards(job_id: str = "", owner: str = "") -> list[Board]:
    """Return the boards on which the groups of all processes are published, or those of one process."""
    return _ask("list the boards", extension.find_boards, job_id, owner)


def dead_actors() -> frozenset[str]:
    """Return the actors of this job that are dead."""
    return _ask("list the dead actors", _ray_private.find_actors, "DEAD")


def actors_being_made() -> frozenset[str]:
    """Return the actors of this job that have been requested and not yet created."""
    states = "DEPENDENCIES_UNREADY", "PENDING_CREATION"
    return _ask("list the actors that are being created", _ray_private.find_actors, *states)


def read_placement_group(group: PlacementGroup) -> Mapping[str, Any]:
    """Return Ray's row of a placement group."""
    return _ask("look at a placement group", placement_group_table, group)
