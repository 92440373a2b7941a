# SPDX-License-Identifier: Apache-2.0
"""Shows a request to an autoscaler, as one unpinned placement group: these are demand until Ray places them."""

from bisect import bisect_left
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager

from ray.util.placement_group import PlacementGroup

from .._model import Node, Request
from .._plan.planner import decide
from .groups import create_group, look_up, remove


class Demand(AbstractContextManager["Demand"]):
    """The group with which a request waits for nodes. It holds nothing of the present nodes.

    When nodes have joined, it is withdrawn, and the request is planned and pinned. So a reservation survives the loss
    of a node as any other one, and requests that wait for the same node do not take it from each other.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._groups: list[PlacementGroup] = []

    def show(self, nodes: Sequence[Node]) -> None:
        """Create the group if that has not been done."""
        if self._groups:
            return
        asks, own = self._request.asks, self._request.unified or self._request.segment_size is not None
        # The first logical node without room has to be on a new node, so Ray places nothing before one joins.
        sizes = range(1, len(asks))
        lacking = bisect_left(sizes, True, key=lambda n: decide(asks[:n], nodes, own_nodes=own).plan is None)
        bundles, selectors = [], []
        for at, ask in enumerate(asks):
            pack = ask.strategy == "STRICT_PACK"
            whole = {name: amount * ask.count for name, amount in ask.bundle.items()}
            parts = [whole] if pack and len(asks) > 1 else [dict(ask.bundle)] * ask.count
            labels = {key: text.replace(" ", "") for key, text in ask.labels.items()}
            is_new = nodes and at == lacking
            new = {"ray.io/node-id": f"!in({','.join(node.node_id for node in nodes)})"} if is_new else {}
            bundles += parts
            selectors += [{**(new if pack or part == 0 else {}), **labels} for part in range(len(parts))]
        strategy = asks[0].strategy if len(asks) == 1 else "STRICT_SPREAD" if own else "PACK"
        name = f"{self._request.name or 'fairlead'}-{asks[0].node_idx}"
        shown = {"name": name, "bundles": bundles, "strategy": strategy, "bundle_label_selector": selectors}
        self._groups.append(create_group(shown))

    def is_among(self, group_ids: AbstractSet[str]) -> bool:
        """Return whether the group is among others."""
        return any(group.id.hex() in group_ids for group in self._groups)

    def withdraw_if_placed(self) -> None:
        """Remove the group if Ray has placed it, so that the request can be planned on the nodes that have joined."""
        ids = {group.id.hex() for group in self._groups}
        if ids and all(row["state"] == "CREATED" for row in look_up(ids).values()):
            self.withdraw()

    def withdraw(self) -> None:
        """Remove the group: what Ray has placed of it is free again."""
        groups, self._groups = self._groups, []
        remove(groups)

    def __exit__(self, *_: object) -> None:
        self.withdraw()
