# SPDX-License-Identifier: Apache-2.0
"""The modules that importing the package loads."""

import subprocess
import sys


def test_import_is_light():
    """Importing the package loads neither Ray nor torch."""
    code = "import sys, fairlead_venvs; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
