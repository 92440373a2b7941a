# SPDX-License-Identifier: Apache-2.0
"""The installed package: its version, and the modules that importing it loads."""

import importlib.metadata
import subprocess
import sys

import fairlead_venvs


def test_version_is_the_distribution_s():
    """The literal version and the installed metadata agree."""
    assert fairlead_venvs.__version__ == importlib.metadata.version("fairlead-venvs")


def test_import_is_light():
    """Importing the package loads neither Ray nor torch."""
    code = "import sys, fairlead_venvs; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
