# SPDX-License-Identifier: Apache-2.0
"""A worker for environments that have Ray and one tensor library, and nothing of Fairlead."""

import importlib
import importlib.util
import os
from typing import Any, NamedTuple

SHAPE = 12, 8


class Box(NamedTuple):
    """Has the attributes of a `LocalTensor`, which such an environment lacks."""

    tensor: Any
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Columns:
    """Holds its columns of "w", and the whole of "norm"."""

    def __init__(self, library):
        self.tools = importlib.import_module(library)
        width = SHAPE[1] // int(os.environ["WORLD_SIZE"])
        self.first = int(os.environ["RANK"]) * width
        self.w = self.tools.zeros((SHAPE[0], width), dtype=self.tools.float32)
        self.norm = self.tools.zeros((5,), dtype=self.tools.float32)

    def expected(self, scale):
        whole = scale * (self.tools.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) + 1)
        return whole[:, self.first : self.first + self.w.shape[1]], scale * self.tools.arange(5)

    def fill(self, scale):
        self.w[...], self.norm[...] = self.expected(scale)

    def weights(self):
        return {"w": Box(self.w, SHAPE, (0, self.first)), "norm": self.norm}

    def holds(self):
        """Return the scale that all elements have; None for a mixture."""
        scale = float(self.norm[1])
        w, norm = self.expected(scale)
        return scale if bool((self.w == w).all()) and bool((self.norm == norm).all()) else None

    def packages(self):
        names = "fairlead_transfer", "fairlead_workergroup", "fairlead_placement", "numpy", "torch"
        return [name for name in names if importlib.util.find_spec(name)]
