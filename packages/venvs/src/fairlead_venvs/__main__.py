# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m fairlead_venvs {build,list,prune,prefetch}`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
