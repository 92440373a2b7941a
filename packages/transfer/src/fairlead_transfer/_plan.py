# SPDX-License-Identifier: Apache-2.0
"""`reshard`: the plan that moves tensors from one layout to another, and its description for people."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from rich.filesize import decimal

from ._display import table_text
from ._layout import Layout
from ._pieces import Ints, PieceTable, make_pieces
from .exceptions import LayoutMismatchError, Mismatch


@dataclass(frozen=True, eq=False)
class TensorSet:
    """Tensors with the same layouts, which are planned once.

    Attributes:
        names: the tensors.
        source: their layout in the source.
        target: their layout in the target.
        pieces: the pieces of each of them.
    """

    names: tuple[str, ...]
    source: Layout
    target: Layout
    pieces: PieceTable


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """The pieces of tensors that each source rank sends to each target rank.

    Attributes:
        tensor_sets: the tensors, in groups with the same layouts.
        source_nodes: the node of each source rank, as a number.
        target_nodes: the node of each target rank, as a number.
    """

    tensor_sets: tuple[TensorSet, ...]
    source_nodes: Ints
    target_nodes: Ints

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in the order of their sets."""
        return tuple(name for same in self.tensor_sets for name in same.names)

    @cached_property
    def bytes_moved(self) -> int:
        """The bytes that target ranks fetch, each of them once; also from their own process."""
        return sum(int(same.pieces.volumes.sum()) * same.source.itemsize * len(same.names) for same in self.tensor_sets)

    @cached_property
    def bytes_between_nodes(self) -> int:
        """The bytes that travel from one node to another."""
        total = 0
        for same in self.tensor_sets:
            pieces = same.pieces
            crosses = self.source_nodes[pieces.senders] != self.target_nodes[pieces.receivers]
            total += int((crosses * pieces.volumes * (pieces.via < 0)).sum()) * same.source.itemsize
        return total

    def __repr__(self) -> str:
        return (
            f"TransferPlan({len(self.names)} tensors in {len(self.tensor_sets)} layouts, {len(self.source_nodes)} -> "
            f"{len(self.target_nodes)} ranks, {decimal(self.bytes_moved)} moved, "
            f"{decimal(self.bytes_between_nodes)} between nodes)"
        )

    def __str__(self) -> str:
        header = ("tensors", "shape", "senders", "receivers", "pieces each", "moved")
        return table_text(repr(self), header, list(self._rows()))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for same in self.tensor_sets:
            names = same.names[0] if len(same.names) == 1 else f"{same.names[0]} and {len(same.names) - 1} more"
            moved = int(same.pieces.volumes.sum()) * same.source.itemsize * len(same.names)
            pieces = same.pieces
            ranks = [str(len(np.unique(ranks))) for ranks in (pieces.senders, pieces.receivers)]
            yield names, str(same.source.shape), *ranks, str(len(pieces.receivers)), decimal(moved)


def reshard(
    source: Layout | Mapping[str, Layout],
    target: Layout | Mapping[str, Layout],
    *,
    source_nodes: Sequence[Hashable],
    target_nodes: Sequence[Hashable],
) -> TransferPlan:
    """Plan how tensors get from one layout to another.

    Every element of every target box is fetched exactly once. A piece that several ranks of one node want crosses to
    that node once. Among the ranks that hold a piece, one on the same node is preferred, then the one that sends fewest
    bytes so far.

    Args:
        source: the layout of each tensor in the source, by name; or one layout, of a tensor without a name.
        target: the same for the target.
        source_nodes: the node of each source rank, such as its id.
        target_nodes: the node of each target rank.

    Returns:
        The plan.

    Raises:
        LayoutMismatchError: a name that only one side has, another global shape or item size, or elements that no
            source rank holds; lists all of them.
        ValueError: a layout for another number of ranks than there are nodes.

    >>> from fairlead_sharding import NamedSharding
    >>> fsdp = Layout.from_sharding((8, 4), NamedSharding.from_shape(dp=4), {0: "dp"})
    >>> tp = Layout.from_sharding((8, 4), NamedSharding.from_shape(tp=2), {1: "tp"})
    >>> reshard(fsdp, tp, source_nodes="aabb", target_nodes="ab")
    TransferPlan(1 tensors in 1 layouts, 4 -> 2 ranks, 32 bytes moved, 16 bytes between nodes)
    """
    sources = {"": source} if isinstance(source, Layout) else dict(source)
    targets = {"": target} if isinstance(target, Layout) else dict(target)
    numbers = {node: number for number, node in enumerate(dict.fromkeys([*source_nodes, *target_nodes]))}
    nodes = [np.array([numbers[node] for node in side], np.int64) for side in (source_nodes, target_nodes)]
    for side, layouts, count in (("source", sources, len(nodes[0])), ("target", targets, len(nodes[1]))):
        if wrong := [name for name, layout in layouts.items() if layout.ranks != count]:
            ranks = layouts[wrong[0]].ranks
            raise ValueError(f"the {side} layout of {wrong[0]!r} is for {ranks} ranks, but {side}_nodes has {count}")
    mismatches = find_mismatches(sources, targets)
    load = np.zeros(len(nodes[0]))
    grouped: dict[tuple[Layout, Layout], list[str]] = {}
    for name in sources if not mismatches else ():
        grouped.setdefault((sources[name], targets[name]), []).append(name)
    tensor_sets = []
    # The largest tensors first, so that the small ones even out what the large ones leave uneven.
    for (held, wanted), names in sorted(grouped.items(), key=lambda item: -item[0][1].volumes.sum()):
        pieces = make_pieces(
            held,
            wanted,
            source_nodes=nodes[0],
            target_nodes=nodes[1],
            load=load,
            tensors=len(names),
        )
        if pieces.missing:
            missing = f"{pieces.missing:,} of the elements that target ranks want"
            text = f"no source rank holds {missing}: check global_shape and offsets"
            mismatches += [Mismatch(name, f"{held}", f"{wanted}", text) for name in names]
        tensor_sets.append(TensorSet(tuple(names), held, wanted, pieces))
    if mismatches:
        raise LayoutMismatchError(tuple(mismatches))
    return TransferPlan(tuple(tensor_sets), *nodes)


def find_mismatches(sources: Mapping[str, Layout], targets: Mapping[str, Layout]) -> list[Mismatch]:
    """Return the tensors that only one side has, or whose global shapes or item sizes differ."""
    mismatches = []
    for name in dict.fromkeys([*sources, *targets]):
        held, wanted = sources.get(name), targets.get(name)
        shapes = ["" if layout is None else str(layout.shape) for layout in (held, wanted)]
        if held is None or wanted is None:
            side, other = ("target", "source") if held is None else ("source", "target")
            text = f"only the {side} has it: return it from the {other}'s method, or use rename= or exclude="
            mismatches.append(Mismatch(name, shapes[0], shapes[1], text))
        elif held.shape != wanted.shape:
            text = (
                f"the global shapes differ, {held.shape} and {wanted.shape}: return a part of a tensor as a DTensor or "
                "LocalTensor, cut padding (as of a vocabulary) off in the method, or leave it out with exclude="
            )
            mismatches.append(Mismatch(name, shapes[0], shapes[1], text))
        elif held.itemsize != wanted.itemsize:
            text = "the item sizes differ: give the dtype that travels with dtype="
            mismatches.append(Mismatch(name, f"{held.itemsize} B", f"{wanted.itemsize} B", text))
    return mismatches
