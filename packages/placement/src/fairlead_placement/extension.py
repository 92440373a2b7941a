# SPDX-License-Identifier: Apache-2.0
"""The interface for packages that are built on fairlead-placement, besides the names that users need.

These names follow the same versioning as those of `fairlead_placement`. They send requests to Ray's head with a
deadline, read what a cluster has, claim slots for a group of workers, run functions on nodes, publish values for other
processes, and release what a dropped object holds.
"""

from ._model import count_bundles, format_coords, group_pairs
from ._nodes.background import OneTimeEvent, run_in_thread
from ._nodes.board import (
    Board,
    await_published,
    find_boards,
    publish,
    read_board,
    read_boards,
    withdraw,
)
from ._nodes.functions import run_on_nodes
from ._nodes.head import (
    alive_nodes,
    ask_head,
    choose_alive,
    head_deadline,
    read_holders,
    read_nodes,
    refuse_client,
    wait_until,
)
from ._ray_private import (
    actor_id_of,
    autoscaler_is_there,
    collect,
    connection,
    drain_deadlines,
    list_raylets,
)
from ._reserve.claims import SlotClaim, claim_slots
from ._reserve.finalizers import release_when_dropped
from ._reserve.groups import create_groups
from ._reserve.groups import remove as remove_placement_groups
from ._reserve.slots import number_slots
from ._terminal import COMMAND_MARK, WIDTH, Output, add_command, attach, run_command
from .exceptions import ErrorWithFields

__all__ = [
    "Board",
    "COMMAND_MARK",
    "ErrorWithFields",
    "OneTimeEvent",
    "Output",
    "SlotClaim",
    "WIDTH",
    "actor_id_of",
    "add_command",
    "alive_nodes",
    "ask_head",
    "attach",
    "autoscaler_is_there",
    "await_published",
    "choose_alive",
    "claim_slots",
    "collect",
    "connection",
    "count_bundles",
    "create_groups",
    "drain_deadlines",
    "find_boards",
    "format_coords",
    "group_pairs",
    "head_deadline",
    "list_raylets",
    "number_slots",
    "publish",
    "read_board",
    "read_boards",
    "read_holders",
    "read_nodes",
    "refuse_client",
    "release_when_dropped",
    "remove_placement_groups",
    "run_command",
    "run_in_thread",
    "run_on_nodes",
    "wait_until",
    "withdraw",
]
