# SPDX-License-Identifier: Apache-2.0
"""Grids cut into tiles, one for each rank, and the edges that tiles need of each other."""

from ._tiles import Tile, cut

__all__ = ["Tile", "cut"]
