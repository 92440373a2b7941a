# SPDX-License-Identifier: Apache-2.0
"""What a cluster offers to look at. Looking reserves nothing."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType

from ._grid import counted, draw
from ._occupancy import groups_on
from ._render import as_html
from ._slot import Slot

__all__ = ["Drawn"]


class Drawn:
    """The pictures of a virtual cluster, for a terminal, for rich and for a notebook."""

    use_gpus: bool
    _counts: tuple[int, ...]

    def _shown_slots(self) -> tuple[Slot, ...]:
        """The slots, if there are any yet."""
        raise NotImplementedError

    def grid(self, worker_groups: Sequence[Any] = (), *, title: str | None = None) -> RenderableType:
        """The cluster as a table for rich: a row per logical node, a cell per slot. Reserves nothing.

        Args:
            worker_groups: groups to draw in it: anything with `name_prefix`, `world_size`, `worker_metadata`.
            title: instead of the headline that counts nodes and GPUs.
        """
        return draw(self._counts, self._shown_slots(), self.use_gpus, worker_groups, title)

    def print_cluster_grid(self, worker_group: Any | None = None) -> None:
        """Print the grid, with the workers of one group. Reserves nothing."""
        Console().print(self.grid([] if worker_group is None else [worker_group]))

    def print_all_worker_groups(self, worker_groups: Sequence[Any] | None = None) -> None:
        """Print the grid with several groups; without an argument, those that live on this cluster."""
        groups = groups_on(self._shown_slots()) if worker_groups is None else list(worker_groups)
        bundles = counted(sum(self._counts), "GPU" if self.use_gpus else "CPU")
        nodes = counted(sum(count > 0 for count in self._counts), "node")
        title = f"Ray Cluster Global View: {nodes}, {bundles}, Worker Groups: {len(groups)}"
        Console().print(self.grid(groups, title=title))

    def _repr_html_(self) -> str:
        return as_html(self.grid(groups_on(self._shown_slots())))
