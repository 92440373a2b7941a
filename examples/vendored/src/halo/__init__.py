# SPDX-License-Identifier: Apache-2.0
"""Cut grids into tiles, one for each rank, and find the neighbors whose edges a tile needs."""

from ._tiles import Tile, cut

__all__ = ["Tile", "cut"]
