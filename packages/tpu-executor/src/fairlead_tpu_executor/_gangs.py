# SPDX-License-Identifier: Apache-2.0
"""What stands for a slice where there are no TPUs: bundles of one kind on whatever hosts have room. Pure."""

from collections.abc import Mapping, Sequence

from fairlead_placement import Node

from ._accelerators.slices import Found, SliceInfo, SliceLack

__all__ = ["gather"]


def gather(nodes: Sequence[Node], bundle: Mapping[str, float], count: int, kind: str) -> Found:
    """`count` bundles on the first nodes that have them free.

    Args:
        nodes: in physical order.
        bundle: what each worker takes.
        count: how many workers.
        kind: what to call it.
    """
    places: list[Node] = []
    for node in nodes:
        fits = min(
            (int(node.free.get(name, 0) / amount + 1e-9) for name, amount in bundle.items() if amount), default=0
        )
        places += [node] * min(fits, count - len(places))
    if len(places) < count:
        each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        return Found(lacking=(SliceLack(kind, f"room for {len(places)} of {count} workers of {each} each"),))
    return Found(
        intact=(
            SliceInfo(
                slice_name=kind,
                kind=kind,
                topology="",
                node_ids=tuple(node.node_id for node in places),
                node_ips=tuple(node.ip for node in places),
                num_accelerators_per_host=int(bundle.get("GPU", 0)),
            ),
        )
    )
