# SPDX-License-Identifier: Apache-2.0
"""Runs the worker groups of verl on Fairlead.

verl loads this package through its plug-ins in every process that imports verl. Nothing else has to be changed. The
environment variable `FAIRLEAD_VERL` turns it off ("0"), or on for any version of verl ("1").

>>> from fairlead_verl import VERSIONS
>>> "0.9.1" in VERSIONS
True
"""

from ._install import VERSIONS, install

__version__ = "0.1.0"

__all__ = ["VERSIONS", "install"]
