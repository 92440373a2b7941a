# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_placement`: show the nodes of a cluster, and explain a request."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
