# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_placement`: what a cluster has, whether a request would fit, and what is wrong with it."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
