# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engines of other frameworks, whose weights travel by shared memory on a node, and by TCP between nodes.

Each module imports its framework when it is imported. This package imports none.
"""

__all__: list[str] = []
