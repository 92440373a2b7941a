# SPDX-License-Identifier: Apache-2.0
"""From two layouts of a tensor to the pieces that travel: which box, from which rank, to which rank.

The edges of all boxes cut the tensor into cells. Each rank holds a cell as a whole or not at all, so that the rest is a
question of sets: who holds a cell, who wants it, and on which nodes. Everything is done on arrays.
"""

import heapq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ._layout import Layout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PieceTable:
    """The pieces of tensors that have the same layouts.

    Attributes:
        receivers: the target rank that each piece goes to.
        starts: the first index of each piece in each dim of the tensor.
        sizes: the lengths of the pieces.
        senders: for each tensor and piece, the source rank that sends it.
        via: the target rank for which the piece crosses to the receiver's node, if that is another one; else -1.
        missing: the number of elements of target boxes that no source rank holds.
    """

    receivers: Ints
    starts: Ints
    sizes: Ints
    senders: Ints
    via: Ints
    missing: int = 0

    @property
    def volumes(self) -> Ints:
        """The number of elements of each piece."""
        volumes: Ints = self.sizes.prod(axis=1, dtype=np.int64)
        return volumes


@dataclass(frozen=True, eq=False)
class Sets:
    """Numbered sets of ranks, one after the other in one array."""

    begins: Ints  # where each set begins in `ranks`, and the end of the last one
    ranks: Ints  # the ranks of all sets

    @property
    def lengths(self) -> Ints:
        """The number of ranks in each set."""
        return np.diff(self.begins)

    def sorted_by(self, load: npt.NDArray[np.float64]) -> "Sets":
        """Return the same sets with the ranks of least load first."""
        owner = np.repeat(np.arange(len(self.begins) - 1), self.lengths)
        return replace(self, ranks=self.ranks[np.lexsort((self.ranks, load[self.ranks], owner))])


def make_pieces(
    source: Layout,
    target: Layout,
    *,
    source_nodes: Ints,
    target_nodes: Ints,
    load: npt.NDArray[np.float64],
    tensors: int = 1,
) -> PieceTable:
    """Return the pieces of `tensors` tensors of these layouts, and add the bytes of each sender to `load`."""
    grid = _Grid(source, target)
    (box, cell), (wanted_box, wanted_cell) = map(grid.find_cells, grid.corners)
    held = np.unique(cell)
    is_held = np.isin(wanted_cell, held)
    missing = int(grid.boxes(wanted_cell[~is_held])[1].prod(axis=1).sum())
    wanted_box, wanted_cell = wanted_box[is_held], wanted_cell[is_held]

    cells, index = np.unique(wanted_cell, return_inverse=True)
    holders, set_of_cell = _holder_sets(box, cell, cells, grid.sources)
    # A row for each target rank and each cell that it wants.
    counts = grid.targets.lengths[wanted_box]
    rows = np.repeat(np.arange(len(wanted_box)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    receivers = grid.targets.ranks[grid.targets.begins[wanted_box[rows]] + np.arange(len(rows)) - first]
    index = index[rows]
    sets, nodes = set_of_cell[index], target_nodes[receivers]
    starts, sizes = grid.boxes(cells[index])
    weights = sizes.prod(axis=1, dtype=np.int64) * source.itemsize

    near, near_of_row = _sets_on_nodes(holders, sets, nodes, source_nodes)
    senders = np.empty((tensors, len(index)), np.int64)
    via = np.full(len(index), -1, np.int64)
    direct, far = np.flatnonzero(near_of_row >= 0), np.flatnonzero(near_of_row < 0)
    senders[:, direct] = _spread(near.sorted_by(load), near_of_row[direct], weights[direct], load, tensors)
    if far.size:
        # A cell crosses to a node for one of its ranks, a different one for each cell; the others have it from there.
        keys, of_row = np.unique(index[far] * (nodes.max() + 1) + nodes[far], return_inverse=True)
        order = np.argsort(of_row, kind="stable")
        counts = np.bincount(of_row, minlength=len(keys))
        primary = far[order[np.cumsum(counts) - counts + np.arange(len(keys)) % counts]]
        chosen = _spread(holders.sorted_by(load), sets[primary], weights[primary], load, tensors)
        senders[:, far] = chosen[:, of_row]
        via[far] = receivers[primary][of_row]
        via[primary] = -1
    return PieceTable(receivers, starts, sizes, senders, via, missing)


class _Grid:
    """The cells into which the edges of all boxes of two layouts cut a tensor.

    `sources` and `targets` are the ranks of each distinct box, and `corners` those boxes in numbers of edges.
    """

    def __init__(self, source: Layout, target: Layout) -> None:
        dims = source.offsets.shape[1]
        filled = [np.flatnonzero(layout.volumes) for layout in (source, target)]
        split = len(filled[0])
        starts = np.concatenate([source.offsets[filled[0]], target.offsets[filled[1]]])
        ends = starts + np.concatenate([source.sizes[filled[0]], target.sizes[filled[1]]])
        self._edges: list[Ints] = []
        corners = np.empty((2, len(starts), dims), np.int64)
        for dim in range(dims):
            edges, index = np.unique(np.stack([starts[:, dim], ends[:, dim]]), return_inverse=True)
            self._edges.append(edges)
            corners[:, :, dim] = index.reshape(2, -1)
        lengths = [max(1, len(edges) - 1) for edges in self._edges]
        self._strides = np.array([int(np.prod(lengths[dim + 1 :], dtype=np.int64)) for dim in range(dims)], np.int64)
        self.corners: list[Ints] = []
        sets = []
        for ranks, part in ((filled[0], slice(0, split)), (filled[1], slice(split, None))):
            corner = corners[:, part]
            key = np.zeros(len(ranks), np.int64)
            for column in (*corner[0].T, *corner[1].T):
                key = np.unique(key * (int(column.max(initial=0)) + 1) + column, return_inverse=True)[1]
            _, first, counts = np.unique(key, return_index=True, return_counts=True)
            self.corners.append(corner[:, first])
            sets.append(Sets(np.concatenate([[0], np.cumsum(counts)]), ranks[np.argsort(key, kind="stable")]))
        self.sources, self.targets = sets

    def find_cells(self, corners: Ints) -> tuple[Ints, Ints]:
        """Return a pair (number of the distinct box, cell) for each cell of each distinct box of one side."""
        low, lengths = corners[0], corners[1] - corners[0]
        counts = lengths.prod(axis=1, dtype=np.int64)
        box = np.repeat(np.arange(len(counts)), counts)
        rest = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
        cell = np.zeros(len(box), np.int64)
        for dim in reversed(range(low.shape[1])):
            rest, index = np.divmod(rest, lengths[box, dim])
            cell += (low[box, dim] + index) * self._strides[dim]
        return box, cell

    def boxes(self, cells: Ints) -> tuple[Ints, Ints]:
        """Return the offsets and the sizes of cells."""
        starts = np.empty((len(cells), len(self._edges)), np.int64)
        sizes = np.empty_like(starts)
        for dim, edges in enumerate(self._edges):
            index, cells = np.divmod(cells, self._strides[dim])
            starts[:, dim] = edges[index] if len(edges) else 0
            sizes[:, dim] = edges[index + 1] - edges[index] if len(edges) else 0
        return starts, sizes


def _holder_sets(box: Ints, cell: Ints, cells: Ints, sources: Sets) -> tuple[Sets, Ints]:
    """Return sets of source ranks, and the number of the set that holds each of `cells`, which ascend.

    `box` and `cell` are the cells of each distinct source box, whose ranks `sources` has.
    """
    is_wanted = np.isin(cell, cells)
    box, cell = box[is_wanted], cell[is_wanted]
    order = np.lexsort((box, cell))
    box, cell = box[order], cell[order]
    counts = np.bincount(np.searchsorted(cells, cell), minlength=len(cells))
    first = np.cumsum(counts) - counts
    set_of_cell = box[first] if len(cells) else np.empty(0, np.int64)
    if not (counts > 1).any():
        return sources, set_of_cell
    # Boxes that overlap without being equal: each combination of boxes is a set of its own.
    numbers: dict[tuple[int, ...], int] = {}
    begins, ranks = list(sources.begins), [sources.ranks]
    for index in np.flatnonzero(counts > 1):
        boxes = tuple(box[first[index] : first[index] + counts[index]].tolist())
        if boxes not in numbers:
            together = np.concatenate(
                [sources.ranks[sources.begins[number] : sources.begins[number + 1]] for number in boxes]
            )
            numbers[boxes] = len(begins) - 1
            ranks.append(np.sort(together))
            begins.append(begins[-1] + len(together))
        set_of_cell[index] = numbers[boxes]
    return Sets(np.array(begins, np.int64), np.concatenate(ranks)), set_of_cell


def _sets_on_nodes(holders: Sets, sets: Ints, nodes: Ints, source_nodes: Ints) -> tuple[Sets, Ints]:
    """Return the part of each set on each node, and for each pair of set and node the number of its part or -1."""
    count = int(max(nodes.max(initial=0), source_nodes.max(initial=0))) + 1
    owner = np.repeat(np.arange(len(holders.lengths)), holders.lengths)
    code = owner * count + source_nodes[holders.ranks]
    order = np.argsort(code, kind="stable")
    codes, begins = np.unique(code[order], return_index=True)
    parts = Sets(np.append(begins, len(order)), holders.ranks[order])
    asked = sets * count + nodes
    index = np.minimum(np.searchsorted(codes, asked), max(0, len(codes) - 1))
    return parts, np.where(codes[index] == asked, index, -1) if len(codes) else np.full(len(asked), -1)


def _spread(sets: Sets, of_row: Ints, weights: Ints, load: npt.NDArray[np.float64], tensors: int) -> Ints:
    """Choose a rank of its set for each row, so that all ranks get about the same bytes; add the bytes to `load`.

    Returned is an array of shape (tensors, rows): each further tensor takes the next rank of the set.
    """
    lengths = sets.lengths[of_row]
    role = np.zeros(len(of_row), np.int64)
    open_rows = np.flatnonzero(lengths > 1)
    order = open_rows[np.lexsort((-weights[open_rows], of_row[open_rows]))]
    heaps: dict[int, list[tuple[float, int]]] = {}
    for row, number, weight in zip(order.tolist(), of_row[order].tolist(), weights[order].tolist(), strict=True):
        heap = heaps.get(number)
        if heap is None:
            ranks = sets.ranks[sets.begins[number] : sets.begins[number + 1]]
            heap = heaps[number] = [(sent, index) for index, sent in enumerate(load[ranks].tolist())]
        sent, role[row] = heap[0]
        heapq.heapreplace(heap, (sent + weight, int(role[row])))
    turns = (role + np.arange(tensors)[:, None]) % lengths
    chosen = sets.ranks[sets.begins[of_row] + turns]
    load += np.bincount(chosen.ravel(), np.tile(weights, tensors), minlength=len(load))
    return chosen
