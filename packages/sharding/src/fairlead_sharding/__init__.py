# SPDX-License-Identifier: Apache-2.0
"""Named coordinates of worker ranks, and plans of which rank gets which data.

>>> sharding = NamedSharding.from_shape(dp=2, tp=4)
>>> sharding.get_worker_coords(6)
{'dp': 1, 'tp': 2}
>>> sharding.groups("dp")
[[0, 4], [1, 5], [2, 6], [3, 7]]

Each data-parallel coordinate gets its own piece, and one of its workers returns a result:

>>> plan = sharding.plan(in_sharded_axes=["dp"], replicate_on_axes=["tp"], output_is_replicated=["tp"])
>>> plan.pieces(["first", "second"])
['first', 'second']
>>> plan.piece.tolist(), plan.returned.tolist()
([0, 0, 0, 0, 1, 1, 1, 1], [0, 4])
"""

from ._sharding import DispatchPlan, NamedSharding

__version__ = "0.1.0"

__all__ = ["DispatchPlan", "NamedSharding", "__version__"]
