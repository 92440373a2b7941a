# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_inspect`: looks at the groups of a cluster while their drivers and workers hang."""

import sys

from ._command import main

if __name__ == "__main__":
    sys.exit(main())
