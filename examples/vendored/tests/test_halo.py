# SPDX-License-Identifier: Apache-2.0
"""The tiles are right, and come from the copy that is carried."""

import importlib.util
import sys

import halo
import numpy as np
import pytest


def step(grid):
    """Each point becomes the mean of its four neighbors; beyond the border is zero."""
    around = np.pad(grid, 1)
    return (around[:-2, 1:-1] + around[2:, 1:-1] + around[1:-1, :-2] + around[1:-1, 2:]) / 4


def test_tiles_with_their_edges_are_as_good_as_the_grid():
    """A step on each tile, with the edges of the ranks beside it, is the step of the whole grid."""
    grid = np.random.default_rng(0).random((6, 8))
    tiles = halo.cut(6, 8, down=3, across=2)
    held = [grid[tile.rows, tile.columns] for tile in tiles]
    result = np.empty_like(grid)
    for tile in tiles:
        around = np.pad(held[tile.rank], 1)
        for beside, to, of in [
            (tile.above, np.s_[0, 1:-1], np.s_[-1, :]),
            (tile.below, np.s_[-1, 1:-1], np.s_[0, :]),
            (tile.left, np.s_[1:-1, 0], np.s_[:, -1]),
            (tile.right, np.s_[1:-1, -1], np.s_[:, 0]),
        ]:
            if beside is not None:
                around[to] = held[beside][of]
        result[tile.rows, tile.columns] = step(around)[1:-1, 1:-1]

    np.testing.assert_allclose(result, step(grid))


def test_uneven_grids_are_refused():
    """Sizes that do not divide are named."""
    with pytest.raises(ValueError, match="7 x 8 points cannot be cut into 3 x 2"):
        halo.cut(7, 8, down=3, across=2)


def test_the_copy_is_our_own():
    """What is used is the carried copy: the original is not even installed."""
    from halo._vendor.sharding import NamedSharding

    assert NamedSharding.__module__.startswith("halo._vendor.sharding.")
    assert importlib.util.find_spec("fairlead_sharding") is None
    assert not any(name.startswith("fairlead") for name in sys.modules)
