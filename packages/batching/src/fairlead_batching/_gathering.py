# SPDX-License-Identifier: Apache-2.0
"""The samples of all ranks of a torch process group."""

from __future__ import annotations

from typing import Any

from . import _interop, _leaf
from ._samples import Samples


def gathered(batch: Samples[Any], group: Any) -> list[Samples[Any]]:
    """The batch of each rank, on every rank; for errors see `BatchedDataDict.all_gather`."""
    # One exchange tells every rank what all have, so that all go on alike or fail alike.
    mine = {key: _leaf.signature(leaf) for key, leaf in batch.data.items()}
    signatures, paddings = zip(*_interop.all_gather_objects((mine, batch.padding), group), strict=True)
    if any(set(other) != set(batch.data) for other in signatures):
        raise ValueError(f"Ranks have different keys: {[sorted(other) for other in signatures]}.")
    ranks: list[Samples[Any]] = [Samples() for _ in signatures]
    for key in signatures[0]:
        if len({(*other[key][:2], len(other[key][2])) for other in signatures}) > 1:
            raise ValueError(f"Ranks have different leaves {key!r}: {[other[key] for other in signatures]}.")
    for key in signatures[0]:
        leaf = batch.data[key]
        if _interop.is_tensor(leaf):
            parts = _interop.all_gather(leaf, [other[key][2] for other in signatures], group)
        else:
            parts = _interop.all_gather_objects(leaf, group)
        for rank, part in zip(ranks, parts, strict=True):
            rank[key] = part
    for rank, padding in zip(ranks, paddings, strict=True):
        rank.padding = padding
    return ranks
