# SPDX-License-Identifier: Apache-2.0
"""Named coordinates over worker ranks, and the plan of who gets what.

>>> sharding = NamedSharding.from_shape(dp=2, tp=4)
>>> sharding.get_worker_coords(6)
{'dp': 1, 'tp': 2}
>>> sharding.groups("dp")
[[0, 4], [1, 5], [2, 6], [3, 7]]

Each data-parallel coordinate gets its own piece, and one worker of each answers:

>>> plan = sharding.plan(in_sharded_axes=["dp"], replicate_on_axes=["tp"], output_is_replicated=["tp"])
>>> plan.pieces(["first", "second"])
['first', 'second']
>>> plan.piece.tolist(), plan.returned.tolist()
([0, 0, 0, 0, 1, 1, 1, 1], [0, 4])
"""

from ._plan import DispatchPlan
from ._sharding import NamedSharding

__version__ = "0.1.0"

__all__ = ["DispatchPlan", "NamedSharding", "__version__"]
