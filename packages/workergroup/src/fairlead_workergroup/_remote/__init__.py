# SPDX-License-Identifier: Apache-2.0
"""Everything that runs in workers or in the agents of their nodes, shipped there by value.

A worker's Python needs Ray and nothing of Fairlead. So the modules here import the standard library, Ray and each other
only, always names and never modules, and only at the top. What several pickles have to share lives in a module of its
own in `sys.modules`, because each pickle has its own copy of globals.
"""

import sys

import ray

# It covers all modules below.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
