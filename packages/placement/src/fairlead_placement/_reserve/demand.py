# SPDX-License-Identifier: Apache-2.0
"""Shows a request to an autoscaler: groups for which Ray chooses the nodes are demand until it has placed them."""

from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from .._model import Request
from .groups import Busy, Impossible, Placed, create_group, describe_groups, look_up, nodes_of, put_together, remove


class Demand(AbstractContextManager["Demand"]):
    """The groups with which a request waits for nodes. The end of the block removes those that have not been taken.

    If no two logical nodes may share a physical node, which groups of single bundles cannot express, each of them is
    one bundle of a group that is only shown: the request is planned again once Ray has placed it.
    """

    def __init__(self, request: Request) -> None:
        self._is_only_shown = request.unified or request.segment_size is not None
        if self._is_only_shown:
            whole = [
                replace(ask, count=1, bundle={name: n * ask.count for name, n in ask.bundle.items()})
                for ask in request.asks
            ]
            spread = [replace(ask, strategy="STRICT_SPREAD") for ask in whole]
            request = replace(request, asks=tuple(spread), unified=True)
        self._request = request
        self._groups: list[PlacementGroup] = []
        self._outcome: Busy | Impossible | None = None

    def show(self, outcome: Busy | Impossible) -> None:
        """Create the groups if that has not been done. `outcome` is why the request waits."""
        if not self._groups:
            for _, options in describe_groups(self._request, {}):
                self._groups.append(create_group(options))
        self._outcome = outcome

    def is_among(self, group_ids: AbstractSet[str]) -> bool:
        """Return whether one of the groups is among others."""
        return any(group.id.hex() in group_ids for group in self._groups)

    def take(self) -> Placed | Busy | Impossible | None:
        """Return the groups, which the caller then owns, if Ray has placed all; why they wait; None to plan again."""
        if not self._groups:
            return None
        rows = look_up({group.id.hex() for group in self._groups})
        placed = [(group, rows.get(group.id.hex(), {})) for group in self._groups]
        if any(row.get("state") != "CREATED" for _, row in placed):
            # What Ray has placed of them is part of this request, so a plan without that would be wrong.
            return None if self._is_only_shown else self._outcome
        self._groups = []
        if self._is_only_shown:
            remove([group for group, _ in placed])
            return None
        return put_together(describe_groups(self._request, {}), [(group, nodes_of(row)) for group, row in placed])

    def __exit__(self, *_: object) -> None:
        remove(self._groups)
