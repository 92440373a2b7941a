# SPDX-License-Identifier: Apache-2.0
"""Import every module of an installed package: `python import_all.py fairlead_batching`.

Only what the extras of the package bring may be missing, and what `OTHERS` lists.
"""

import importlib
import importlib.metadata
import pkgutil
import re
import sys

# The frameworks of adapters.
OTHERS = {"miles", "nemo_rl", "slime", "verl"}

package = importlib.import_module(sys.argv[1])
assert str(package.__file__).startswith(sys.prefix), f"{package.__file__} is not from {sys.prefix}"
required = importlib.metadata.requires(package.__name__) or ()
extras = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in required if "extra ==" in line}
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        # Some modules say in an error of their own which extra to install.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        missing = (cause.name or "").partition(".")[0]
        if missing not in extras | OTHERS:
            raise
