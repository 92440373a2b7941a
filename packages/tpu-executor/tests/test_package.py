# SPDX-License-Identifier: Apache-2.0
"""What can be said of a package that exports nothing yet."""

import importlib.metadata
import subprocess
import sys

import fairlead_tpu_executor


def test_version_is_the_distribution_s():
    """The literal version and the installed metadata agree."""
    assert fairlead_tpu_executor.__version__ == importlib.metadata.version("fairlead-tpu-executor")


def test_import_is_light():
    """Importing the package loads neither Ray nor torch."""
    code = "import sys, fairlead_tpu_executor; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
