# SPDX-License-Identifier: Apache-2.0
"""Checkpoint engines of other frameworks, whose weights travel by memory that their processes share.

Each module imports its framework when it is imported. This package imports none.
"""

__all__: list[str] = []
