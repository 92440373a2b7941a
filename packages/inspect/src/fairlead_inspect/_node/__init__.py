# SPDX-License-Identifier: Apache-2.0
"""Everything that looks at the processes of one node, shipped there by value. It needs Python, Linux and py-spy.

It reads only: it sends no signal, stops no process, and runs no code in one. Its modules import the standard library
and each other, always names and never modules.
"""

import sys

import ray

# This covers all modules of this package.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
