# SPDX-License-Identifier: Apache-2.0
"""Everything that runs in workers or on their nodes, shipped there by value.

A worker's Python needs Ray and nothing of Fairlead. So these modules import only the standard library, Ray, each other
and `_ray_private`; they import names, never modules, and only at the top. State that several pickles share lives in a
module of its own in `sys.modules`, because each pickle has its own copy of the globals.
"""

import sys

import ray

from .. import _ray_private

# This covers all modules of this package.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(_ray_private)
