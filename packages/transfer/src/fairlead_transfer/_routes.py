# SPDX-License-Identifier: Apache-2.0
"""Which way tensors go: layouts, plan, tasks and transports, made again only when something has changed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ._descriptions import Selection, Tensors, check_dtypes, read_side, with_ranks
from ._layout import Layout
from ._plan import TransferPlan, find_mismatches, reshard
from ._report import TransferExplanation
from ._side import EndState, Side
from ._tasks import Tasks, make_tasks
from .exceptions import LayoutMismatchError

Transport = Literal["auto", "object_store"]

FITS = {
    "shared_memory": "the ranks are on one node, and the target can open the memory of the source",
    "tcp": "the ranks are on different nodes, or cannot share memory",
    "object_store": "the link uses nothing else, or the ranks cannot connect",
}


@dataclass(frozen=True)
class Route:
    """A plan and the tasks that carry it out."""

    plan: TransferPlan  # who sends which piece to whom
    tasks: Tasks  # for the workers
    sources: frozenset[int]  # the source ranks that take part
    targets: frozenset[int]  # the target ranks that take part


@dataclass(frozen=True)
class Staged:
    """The parts of a version that the source ranks keep until the next one."""

    version: int  # which one
    route: Route  # by which it was staged
    replies: Mapping[int, Any]  # of the source ranks, which say where it is
    ends: Mapping[int, EndState]  # of the source ranks, which are others after a restart
    described: Mapping[int, Any]  # the descriptions by the target ranks at that time

    def is_kept(self, source: Side, ranks: Collection[int]) -> bool:
        """Return whether the source ranks still have what some target ranks need."""
        tasks = self.route.tasks.target
        if not self.route.targets.issuperset(ranks):
            return False
        needed = {source for rank in ranks for source in tasks[rank]["sources"]}
        same = all(source.ends.get(rank) is self.ends[rank] and rank not in source.lost for rank in needed)
        return same and not any(tasks[rank]["local"] for rank in ranks)


class Router:
    """Makes the routes of a link, and keeps the last one.

    Attributes:
        selection, transport: as given.
    """

    def __init__(self, source: Side, target: Side, selection: Selection, transport: Transport) -> None:
        self._source = source
        self._target = target
        self.selection = selection
        self.transport: Transport = transport
        self._numbers = 0
        # By the process that sends, the one that receives, and transport: why they cannot use it.
        self._blocked: dict[tuple[tuple[int, int], tuple[int, int], str], str] = {}
        # The last route, and the processes and tensors that it was made for.
        self._kept: Route | None = None
        self._made_for: Any = None
        # The route by which replicas were compared last.
        self._compared: Route | None = None

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

    def needs_digests(self, route: Route | None, check_replicas: str) -> bool:
        """Return whether replicas are to be compared in a transfer by a route, as the link's `check_replicas` says."""
        return check_replicas == "always" or (
            check_replicas == "first" and (route is None or route is not self._compared)
        )

    def note_compared(self, route: Route) -> None:
        """Note that replicas have been compared in a transfer by the last route."""
        if route is self.kept:
            self._compared = route

    def block(self, side: Side, source: int, target: int, transport: str, reason: str) -> None:
        """Note that two processes cannot use a transport, so that the next route takes another one.

        Args:
            side: the side that sends.
            source: the source rank.
            target: the target rank.
            transport: the transport.
            reason: why.
        """
        self._blocked[side.ends[source].process, self._target.ends[target].process, transport] = reason
        self._kept = None

    def make(self, without: Collection[int] = ()) -> Route:
        """Make the route from the source, without some of its ranks, to all target ranks, and keep it."""
        source, target = self._source, self._target
        sources = frozenset(range(len(source.members))) - frozenset(without)
        held = self._read(source, sources, renamed=True)
        if target.method is None:
            wanted = whole_tensors(held, len(target.members))
        else:
            wanted = self._read(target, range(len(target.members)))
        route = self._route(source, held, wanted, sources, range(len(target.members)))
        self._kept, self._made_for = route if not without else None, self._describe()
        return route

    def make_from_replicas(self, replicas: Side, good: Collection[int], ranks: Collection[int]) -> Route:
        """Make the route from target ranks that hold a version to others; refuse tensors that no rank holds."""
        held = self._read(replicas, good)
        wanted = with_ranks(self._read(self._target, ranks), ranks)
        return self._route(replicas, held, wanted, good, ranks)

    def explain(self, route: Route) -> TransferExplanation:
        """Describe a route for people."""
        used = sorted(set(route.tasks.transports.values()))
        if self.transport != "auto":
            return TransferExplanation(
                route.plan, route.tasks.transports, {self.transport: f"transport={self.transport!r}"}
            )
        passed: dict[str, dict[str, None]] = {kind: {} for kind in used}
        for pair, kind in route.tasks.transports.items():
            passed[kind].update(dict.fromkeys(self._choose(self._source, *pair)[1]))
        reasons = {}
        for kind in used:
            refused = list(passed[kind])
            more = [f"and {len(refused) - 3} more"] if len(refused) > 3 else []
            reasons[kind] = "; ".join([FITS[kind], *refused[:3], *more])
        return TransferExplanation(route.plan, route.tasks.transports, reasons)

    def _choose(self, side: Side, source: int, target: int) -> tuple[str, list[str]]:
        """Return the transport of a pair of ranks, and why those before it in the order cannot be taken."""
        if self.transport == "object_store":
            return self.transport, []
        processes, passed = (side.ends[source].process, self._target.ends[target].process), list[str]()
        kinds = ("shared_memory", "tcp") if side.nodes[source] == self._target.nodes[target] else ("tcp",)
        for kind in kinds:
            reason = self._blocked.get((*processes, kind))
            if reason is None:
                return kind, passed
            passed.append(f"{kind} cannot be taken: {reason}")
        return "object_store", passed

    def _read(self, side: Side, ranks: Collection[int], *, renamed: bool = False) -> Tensors:
        described = [side.ends[member.rank].described if member.rank in ranks else None for member in side.members]
        name = "source" if side.name == "source" else "target"
        return read_side(name, described, self.selection, renamed=renamed)

    def _route(
        self, source: Side, held: Tensors, wanted: Tensors, sources: Collection[int], targets: Collection[int]
    ) -> Route:
        self._numbers += 1

        def choose(*pair: int) -> str:
            return self._choose(source, *pair)[0]

        plan, tasks = plan_tasks(
            self._numbers,
            held,
            wanted,
            self.selection,
            (source.nodes, self._target.nodes),
            choose,
            same_processes=source.name == "source" and source.group is self._target.group,
        )
        return Route(plan, tasks, frozenset(sources), frozenset(targets))


def plan_tasks(
    number: int,
    held: Tensors,
    wanted: Tensors,
    selection: Selection,
    nodes: tuple[Sequence[str], Sequence[str]],
    choose: Callable[[int, int], str],
    *,
    same_processes: bool = False,
) -> tuple[TransferPlan, Tasks]:
    """Return the plan from the nodes of the source to those of the target, and the tasks with this number.

    `choose` returns the transport of a pair of ranks.
    """
    if wrong := check_dtypes(held, wanted, selection):
        others = [mismatch for mismatch in find_mismatches(held.layouts, wanted.layouts) if mismatch.name not in wrong]
        raise LayoutMismatchError((*wrong.values(), *others))
    plan = reshard(
        held.layouts, wanted.layouts, source_nodes=nodes[0], target_nodes=nodes[1], same_processes=same_processes
    )
    dtypes = {name: selection.travelling(dtype) for name, dtype in held.dtypes.items()}
    return plan, make_tasks(number, plan, held, wanted, dtypes, choose)


def whole_tensors(held: Tensors, ranks: int) -> Tensors:
    """Return the same tensors, each as a whole on each rank."""
    made = {
        layout: Layout.replicated(layout.shape, ranks, itemsize=layout.itemsize)
        for layout in set(held.layouts.values())
    }
    layouts = {name: made[layout] for name, layout in held.layouts.items()}
    return Tensors(layouts, held.dtypes, {name: name for name in layouts}, held.library)
