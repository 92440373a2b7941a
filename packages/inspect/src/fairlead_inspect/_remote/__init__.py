# SPDX-License-Identifier: Apache-2.0
"""Everything that runs in workers or in the agents of their nodes, shipped there by value.

Their Python needs Ray, and nothing of Fairlead. So these modules import the standard library, each other, and functions
of `fairlead_workergroup.spi` that are shipped by value too; always names and never modules, and only at the top.
"""

import sys

import ray

# This covers all modules of this package.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
