# SPDX-License-Identifier: Apache-2.0
"""Tests of the tiles, and of the vendored copy that they are computed with."""

import importlib.util
import sys

import halo
import numpy as np
import pytest


def step(grid):
    """Replace each point by the mean of its four neighbors. Points beyond the border are zero."""
    around = np.pad(grid, 1)
    return (around[:-2, 1:-1] + around[2:, 1:-1] + around[1:-1, :-2] + around[1:-1, 2:]) / 4


def test_tiles_with_neighbor_edges_match_the_whole_grid():
    """Stepping each tile with the edges of its neighbors gives the same result as stepping the whole grid."""
    grid = np.random.default_rng(0).random((6, 8))
    tiles = halo.cut(6, 8, down=3, across=2)
    parts = [grid[tile.rows, tile.columns] for tile in tiles]
    result = np.empty_like(grid)
    for tile in tiles:
        around = np.pad(parts[tile.rank], 1)
        for beside, to, of in [
            (tile.above, np.s_[0, 1:-1], np.s_[-1, :]),
            (tile.below, np.s_[-1, 1:-1], np.s_[0, :]),
            (tile.left, np.s_[1:-1, 0], np.s_[:, -1]),
            (tile.right, np.s_[1:-1, -1], np.s_[:, 0]),
        ]:
            if beside is not None:
                around[to] = parts[beside][of]
        result[tile.rows, tile.columns] = step(around)[1:-1, 1:-1]

    np.testing.assert_allclose(result, step(grid))


def test_uneven_grids_are_rejected():
    """The error names sizes that do not divide evenly."""
    with pytest.raises(ValueError, match="7 x 8 points cannot be cut into 3 x 2"):
        halo.cut(7, 8, down=3, across=2)


def test_vendored_copy_is_used():
    """The tiles use the vendored copy, and the original package is not installed."""
    from halo._vendor.sharding import NamedSharding

    assert NamedSharding.__module__.startswith("halo._vendor.sharding.")
    assert importlib.util.find_spec("fairlead_sharding") is None
    assert not any(name.startswith("fairlead") for name in sys.modules)
