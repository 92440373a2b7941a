# SPDX-License-Identifier: Apache-2.0
"""Batches of tensors: shard, pad, pack, microbatch, restore.

Nothing is exported yet: this release holds the name and the version, the work follows in 0.1.x.
"""

__version__ = "0.1.0"

__all__: list[str] = []
