# SPDX-License-Identifier: Apache-2.0
"""The assignment of grid tiles to ranks."""

from dataclasses import dataclass

from ._vendor.sharding import NamedSharding


@dataclass(frozen=True)
class Tile:
    """The tile of one rank: its rows and columns of the grid, and the neighboring ranks (None at the border)."""

    rank: int
    rows: slice
    columns: slice
    above: int | None
    below: int | None
    left: int | None
    right: int | None


def cut(height: int, width: int, *, down: int, across: int) -> list[Tile]:
    """Return the tiles of a grid for ``down`` x ``across`` ranks, by rank.

    Raises:
        ValueError: If ``height`` or ``width`` does not divide evenly.
    """
    if height % down or width % across:
        raise ValueError(f"{height} x {width} points cannot be cut into {down} x {across} equal tiles")
    ranks = NamedSharding.from_shape(down=down, across=across)
    rows, columns = height // down, width // across

    def tile(rank: int) -> Tile:
        at = ranks.get_worker_coords(rank)

        def beside(down: int, across: int) -> int | None:
            found = ranks.get_ranks_by_coord(down=at["down"] + down, across=at["across"] + across)
            return found[0] if found else None

        return Tile(
            rank,
            slice(at["down"] * rows, (at["down"] + 1) * rows),
            slice(at["across"] * columns, (at["across"] + 1) * columns),
            above=beside(-1, 0),
            below=beside(+1, 0),
            left=beside(0, -1),
            right=beside(0, +1),
        )

    return [tile(rank) for rank in range(ranks.size)]
