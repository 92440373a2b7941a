# SPDX-License-Identifier: Apache-2.0
"""The samples of all ranks of a torch process group.

A rank that fails before a collective would leave the others waiting for it. So each step that can fail on one rank
only is followed by an exchange in which every rank learns of the failure, and all of them raise it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from . import _interop, _leaf
from ._samples import Samples

_T = TypeVar("_T")


def gathered(batch: Samples[Any], group: Any) -> list[Samples[Any]]:
    """Return the batch of each rank, on every rank; for errors see `BatchedDataDict.all_gather`."""
    flat: dict[str, Any] = {}

    def describe() -> tuple[Any, ...]:
        batch.size  # noqa: B018
        signatures = {key: _leaf.signature(leaf) for key, leaf in batch.data.items()}
        tensors = {key: leaf for key, leaf in batch.data.items() if _interop.is_tensor(leaf)}
        flat.update((key, _interop.flat_bytes(leaf)) for key, leaf in tensors.items())
        others = {key: leaf for key, leaf in batch.data.items() if key not in tensors}
        return signatures, batch.padding, {key: pickle.dumps(leaf, protocol=5) for key, leaf in others.items()}

    signatures, paddings, pickles = zip(*_exchanged(describe, group), strict=True)
    _check_alike(signatures)
    ranks: list[Samples[Any]] = [Samples() for _ in signatures]
    memory: dict[str, tuple[Any, list[Any]]] = {}

    def make_room() -> None:
        for key in signatures[0]:
            leaf = batch.data[key]
            if key in flat:
                shapes = [other[key][-1] for other in signatures]
                memory[key] = _interop.gathering_memory(flat[key], leaf.element_size(), shapes)
                for rank, data, shape in zip(ranks, memory[key][1], shapes, strict=True):
                    rank[key] = _interop.from_bytes(data, leaf, shape)
            else:
                for rank, others in zip(ranks, pickles, strict=True):
                    rank[key] = pickle.loads(others[key])

    _exchanged(make_room, group)
    # In the order of rank 0, so that the tensors of all ranks meet.
    for key in signatures[0]:
        if key in memory:
            _interop.all_gather(*memory[key], group)
    for rank, padding in zip(ranks, paddings, strict=True):
        rank.padding = padding
    return ranks


def _exchanged(step: Callable[[], _T], group: Any) -> list[_T]:
    """Return what ``step`` returns on each rank.

    Raises:
        ValueError: the step failed on some rank; every rank raises this.
    """
    failure: Exception | None = None
    mine: tuple[_T | None, str | None]
    try:
        mine = step(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks have to learn of it
        failure = error
        mine = None, f"{type(error).__name__}: {error}"
    answers = _interop.all_gather_objects(mine, group)
    failed = [f"rank {rank} ({text})" for rank, (_, text) in enumerate(answers) if text is not None]
    if failed:
        raise ValueError(f"all_gather failed before any tensor was sent, on {', '.join(failed)}.") from failure
    return [value for value, _ in answers]


def _check_alike(signatures: tuple[dict[str, tuple[Any, ...]], ...]) -> None:
    if any(set(other) != set(signatures[0]) for other in signatures):
        raise ValueError(f"Ranks have different keys: {[sorted(other) for other in signatures]}.")
    for key in signatures[0]:
        if len({(*other[key][:-1], len(other[key][-1])) for other in signatures}) > 1:
            raise ValueError(f"Ranks have different leaves {key!r}: {[other[key] for other in signatures]}.")
