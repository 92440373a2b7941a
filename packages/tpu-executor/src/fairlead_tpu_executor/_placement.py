# SPDX-License-Identifier: Apache-2.0
"""The interface of fairlead-placement for packages that are built on it, under one name."""

from fairlead_placement import extension

__all__ = ["extension"]
