# SPDX-License-Identifier: Apache-2.0
"""`python -m fairlead_inspect`: names the process that a Ray job waits for, while its driver and workers hang."""

import sys

from ._command import main

if __name__ == "__main__":
    sys.exit(main())
