# SPDX-License-Identifier: Apache-2.0
"""Everything that runs in workers, shipped there by value.

A worker's Python needs Ray, and the library that its tensors come from. So the modules here import the standard
library, Ray and each other only, always names and never modules, and only at the top. What several pickles share lives
in a module of its own in `sys.modules`, because each pickle has its own copy of globals.
"""

import sys

import ray

# It covers all modules below.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
