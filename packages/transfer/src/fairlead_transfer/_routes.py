# SPDX-License-Identifier: Apache-2.0
"""Which way tensors go: layouts, plan, tasks and transports, made again only when something has changed."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from ._descriptions import Selection, Tensors, check_dtypes, check_exclude, read_side, with_ranks
from ._layout import Layout
from ._plan import TransferPlan, find_mismatches, reshard
from ._side import Side
from ._tasks import Tasks, make_tasks
from .exceptions import LayoutMismatchError

Transport = Literal["auto", "object_store"]


@dataclass(frozen=True)
class Route:
    """A plan and the tasks that carry it out."""

    plan: TransferPlan  # who sends which piece to whom
    tasks: Tasks  # for the workers
    targets: frozenset[int]  # the target ranks that take part
    described: dict[int, Any]  # what the target ranks have said of their tensors


class Router:
    """Makes the routes of a link, and keeps the last one."""

    def __init__(self, source: Side, target: Side, selection: Selection, transport: Transport) -> None:
        self._source = source
        self._target = target
        self.selection = selection
        self.transport: Transport = transport
        self._numbers = 0
        # The last route, and the processes and tensors that it was made for.
        self._kept: Route | None = None
        self._made_for: Any = None
        # The route by which replicas were compared last.
        self.compared: Route | None = None

    @property
    def kept(self) -> Route | None:
        """The last route, if nothing has changed since."""
        return self._kept if self._made_for == self._describe() else None

    def _describe(self) -> Any:
        """Return what a route depends on: the processes of both sides, and their tensors."""
        return [
            [(rank, end.process, end.described) for rank, end in side.ends.items()]
            for side in (self._source, self._target)
        ]

    def make(self, without: Collection[int] = ()) -> Route:
        """Make the route from the source, without some of its ranks, to all target ranks, and keep it."""
        source, target = self._source, self._target
        if not without:  # ranks that are gone may be the only ones with a name
            check_exclude(self.selection, source.names, target.names)
        sources = frozenset(range(len(source.members))) - frozenset(without)
        held = self._read(source, sources, renamed=True)
        if target.method is None:
            wanted = whole_tensors(held, len(target.members))
        else:
            wanted = self._read(target, range(len(target.members)))
        route = self._route(source, held, wanted, range(len(target.members)))
        self._kept, self._made_for = route if not without else None, self._describe()
        return route

    def make_from_replicas(self, replicas: Side, good: Collection[int], ranks: Collection[int]) -> Route:
        """Make the route from target ranks that hold a version to others; refuse tensors that no rank holds."""
        held = self._read(replicas, good)
        wanted = with_ranks(self._read(self._target, ranks), ranks)
        return self._route(replicas, held, wanted, ranks)

    def _read(self, side: Side, ranks: Collection[int], *, renamed: bool = False) -> Tensors:
        described = [side.ends[member.rank].described if member.rank in ranks else None for member in side.members]
        return read_side(side.role, described, self.selection, renamed=renamed)

    def _route(self, source: Side, held: Tensors, wanted: Tensors, targets: Collection[int]) -> Route:
        if wrong := check_dtypes(held, wanted, self.selection):
            others = [
                mismatch for mismatch in find_mismatches(held.layouts, wanted.layouts) if mismatch.name not in wrong
            ]
            raise LayoutMismatchError((*wrong.values(), *others))
        # What a process sends to itself is staged too: its tensors may change before the commit.
        plan = reshard(held.layouts, wanted.layouts, source_nodes=source.nodes, target_nodes=self._target.nodes)
        dtypes = {name: self.selection.travelling(dtype) for name, dtype in held.dtypes.items()}

        def choose(sender: int, receiver: int) -> str:
            if self.transport == "object_store":
                return self.transport
            return "shared_memory" if source.nodes[sender] == self._target.nodes[receiver] else "tcp"

        self._numbers += 1
        tasks = make_tasks(self._numbers, plan, held, wanted, dtypes, choose)
        described = {rank: self._target.ends[rank].described for rank in targets}
        return Route(plan, tasks, frozenset(targets), described)


def whole_tensors(held: Tensors, ranks: int) -> Tensors:
    """Return the same tensors, each as a whole on each rank."""
    made = {
        layout: Layout.replicated(layout.shape, ranks, itemsize=layout.itemsize)
        for layout in set(held.layouts.values())
    }
    layouts = {name: made[layout] for name, layout in held.layouts.items()}
    return Tensors(layouts, held.dtypes, {name: name for name in layouts}, held.library)
