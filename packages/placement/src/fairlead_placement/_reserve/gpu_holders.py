# SPDX-License-Identifier: Apache-2.0
"""Who holds which GPU of a node, as far as Ray tells."""

from collections.abc import Iterable, Sequence

from .._nodes.inventory import read_holders
from .._ray_private import LiveActor, live_actors
from .._show.report import Holder

__all__ = ["held_by"]


def held_by(node_id: str, names: Sequence[str], missing: Iterable[str], free: Iterable[str]) -> str:
    """One sentence part for each missing id: which actor or which idle reservation holds it.

    Args:
        node_id: the node.
        names: ids of all its GPUs, in Ray's order.
        missing: the ids to explain.
        free: ids that nobody holds.

    Ray says which GPUs a live actor has. It does not say which ones a placement group has in which nothing runs, so
    those are told by elimination: when several groups are idle on the node, all of them are named.
    """
    actors = [actor for actor in live_actors() if actor.gpus and actor.node_id == node_id]
    groups = {
        holder.holder_id: holder
        for holder in read_holders()
        if holder.kind == "placement group" and node_id in holder.bundles
    }
    of_id: dict[str, list[LiveActor]] = {}
    for actor in actors:
        for index in actor.gpus:
            if index < len(names):
                of_id.setdefault(names[index], []).append(actor)
    idle = [group for group in groups.values() if _gpus(group, node_id) > _used(group, actors)]
    dark = set(names) - set(of_id) - set(free)
    suspects = [f"placement group {_group(group)}, in which nothing runs" for group in idle]
    # Of tasks nothing is told at all.
    if len(dark) > sum(_gpus(group, node_id) - _used(group, actors) for group in idle):
        suspects.append("a running task")
    unexplained = sorted(set(missing) & dark, key=_numeric)
    parts = [
        f"id {one} is held by " + " and ".join(_actor(actor, groups.get(actor.group_id)) for actor in of_id[one])
        for one in sorted(set(missing) & set(of_id), key=_numeric)
    ]
    if unexplained:
        ids = ("id " if len(unexplained) == 1 else "ids ") + ", ".join(unexplained)
        parts.append(f"{ids} {'is' if len(unexplained) == 1 else 'are'} held by {' or '.join(suspects)}")
    return "; ".join(parts)


def _gpus(group: Holder, node_id: str) -> float:
    return sum(bundle.get("GPU", 0) for bundle in group.bundles[node_id])


def _used(group: Holder, actors: Sequence[LiveActor]) -> int:
    return len({index for actor in actors if actor.group_id == group.holder_id for index in actor.gpus})


def _actor(actor: LiveActor, group: Holder | None) -> str:
    name = f" {actor.name!r}" if actor.name else ""
    inside = "" if group is None else f" in placement group {_group(group)}"
    return f"actor {actor.class_name}{name} (job {actor.job_id}){inside}"


def _group(group: Holder) -> str:
    return f"{group.name or 'unnamed'} {group.holder_id[:8]} (job {group.job_id})"


def _numeric(one: str) -> tuple[int, str]:
    return (int(one) if one.isdigit() else -1, one)
