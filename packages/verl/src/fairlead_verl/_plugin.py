# SPDX-License-Identifier: Apache-2.0
"""The plug-in of verl: importing it installs this package in verl."""

import sys
import traceback

from ._install import install

try:
    install()
except Exception:
    # verl drops errors of plug-ins.
    print("fairlead-verl failed, so verl uses its own worker groups here:", file=sys.stderr)  # noqa: T201
    traceback.print_exc()
    raise
