# SPDX-License-Identifier: Apache-2.0
"""How many slices to hold, and for how long to wait for them; and the request to an autoscaler for missing ones."""

import logging
import uuid
from collections.abc import Collection, Sequence

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from fairlead_placement.extension import autoscaler_is_there, count_bundles, read_nodes, remove_placement_groups

from .._accelerators.config import AcceleratorConfigType
from .._accelerators.slices import SliceInfo, SliceShortage, Survey
from .._health import Head
from ..exceptions import HeadUnreachableError
from .leases import RETURN_TIMEOUT_S

logger = logging.getLogger(__name__)


def survey(config: AcceleratorConfigType, held: Collection[SliceInfo], quarantined: Collection[str]) -> Survey:
    """Read the nodes once, and return which slices are free and not held, and why the others are not free."""
    nodes = {node.node_id: node for node in read_nodes()}
    names = {one.slice_name for one in held}
    present = config.find(list(nodes.values()), quarantined)
    free: list[SliceInfo] = []
    lacking = [lack for lack in present.lacking if lack.slice_name not in names]
    for one in present.intact:
        if one in held:
            continue
        bad = [str(worker) for worker, node_id in enumerate(one.node_ids) if node_id in quarantined]
        hosts = [(config.bundle(one, worker), nodes[node_id].free) for worker, node_id in enumerate(one.node_ids)]
        busy = [str(worker) for worker, (bundle, free) in enumerate(hosts) if not count_bundles(bundle, free)]
        if bad:
            reason = f"worker {', '.join(bad)} did not answer, or its accelerators did not start, a while ago"
            lacking.append(SliceShortage(one.slice_name, reason))
        elif busy:
            lacking.append(SliceShortage(one.slice_name, f"somebody else uses worker {', '.join(busy)}"))
        else:
            free.append(one)
    return Survey(tuple(free), tuple(lacking))


def choose_size(sizes: Sequence[int], held: int, free: int, *, waited_out: bool) -> int | None:
    """Return how many slices to hold now; None means to wait for the largest allowed number. Pure."""
    possible = [size for size in sizes if size <= held + free]
    return possible[-1] if possible and (possible[-1] == sizes[-1] or waited_out) else None


def choose_waits(
    sizes: Sequence[int], held: int, lost: int, *, scale_s: float, replace_s: float
) -> tuple[float, float]:
    """Return the seconds to wait for the largest allowed number of slices, and for any allowed number. Pure."""
    if lost:
        return min(scale_s, replace_s), replace_s
    waiting = 0.0 if held in sizes else scale_s
    return waiting, waiting


def show_missing(config: AcceleratorConfigType, shown: list[PlacementGroup], count: int) -> None:
    """Show an autoscaler `count` missing slices, by groups that request resources: no type of node has their labels."""
    if not autoscaler_is_there():
        return
    # The hosts of a group that Ray has placed are there. `ready()` would leave a request at the head with each call.
    come = [group for group in shown if placement_group_table(group).get("state") == "CREATED"]
    shown[:] = [group for group in shown if group not in come]
    remove_placement_groups(come, timeout_s=RETURN_TIMEOUT_S)
    for _ in range(count - len(shown) - len(come)):
        bundles = [config.bundle(config.template(), worker) for worker in range(config.hosts_per_slice)]
        name = f"fairlead-wanted-{config.kind}-{uuid.uuid4().hex[:8]}"
        shown.append(placement_group(bundles, strategy="PACK", name=name))


def withdraw(config: AcceleratorConfigType, shown: list[PlacementGroup], head: Head) -> None:
    """Remove the groups that show missing slices. Can be repeated."""
    groups, shown[:] = shown[:], []
    try:
        if groups:
            head.call(lambda: remove_placement_groups(groups, timeout_s=RETURN_TIMEOUT_S))
    except HeadUnreachableError as error:  # The wait ends with its own error.
        logger.warning("Placement groups that request %s from an autoscaler may remain: %s", config.kind, error)
