# SPDX-License-Identifier: Apache-2.0
"""Everything that runs in workers, shipped there by value.

A worker's Python needs Ray, pyzmq between nodes, and nothing of Fairlead. So these modules import only the standard
library, Ray, each other, and from `fairlead_workergroup.spi` functions that are shipped by value too. They import
names, never modules, and only at the top.
"""

import sys

import ray

# This covers all modules of this package.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
