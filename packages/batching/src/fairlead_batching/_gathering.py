# SPDX-License-Identifier: Apache-2.0
"""The samples of all ranks of a torch process group.

If a rank failed before a collective, the others would wait for it. So after each step that can fail on a single rank
the ranks exchange their failures, and all of them raise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from . import _interop, _leaf
from ._leaf import BoolArray

_T = TypeVar("_T")


def gather(
    leaves: Mapping[str, Any], padding: BoolArray | None, group: Any
) -> list[tuple[dict[str, Any], BoolArray | None]]:
    """Return the leaves and the padding of each rank, on every rank; for errors see `BatchedDataDict.all_gather`."""
    flat: dict[str, Any] = {}

    def describe() -> tuple[Any, ...]:
        _leaf.count_samples(leaves)  # raises if leaves disagree
        signatures = {key: _leaf.signature(leaf) for key, leaf in leaves.items()}
        tensors = {key: leaf for key, leaf in leaves.items() if _interop.is_tensor(leaf)}
        flat.update((key, _interop.flat_bytes(leaf)) for key, leaf in tensors.items())
        others = {key: pickle.dumps(leaf, protocol=5) for key, leaf in leaves.items() if key not in tensors}
        return signatures, padding, others

    signatures, paddings, pickles = zip(*_exchange(describe, group), strict=True)
    _check_alike(signatures)
    ranks: list[dict[str, Any]] = [{} for _ in signatures]
    memory: dict[str, tuple[Any, list[Any]]] = {}

    def allocate() -> None:
        for key in signatures[0]:
            leaf = leaves[key]
            if key in flat:
                shapes = [other[key][-1] for other in signatures]
                memory[key] = _interop.gathering_memory(flat[key], leaf.element_size(), shapes)
                for rank, data, shape in zip(ranks, memory[key][1], shapes, strict=True):
                    rank[key] = _interop.from_bytes(data, leaf, shape)
            else:
                for rank, others in zip(ranks, pickles, strict=True):
                    rank[key] = pickle.loads(others[key])

    _exchange(allocate, group)
    # Every rank gathers in the order of rank 0, so that all of them gather the same tensor at the same time.
    for key in signatures[0]:
        if key in memory:
            _interop.all_gather(*memory[key], group)
    return list(zip(ranks, paddings, strict=True))


def _exchange(step: Callable[[], _T], group: Any) -> list[_T]:
    """Run ``step`` and return its value on each rank.

    Raises:
        ValueError: the step failed on some rank; every rank raises this.
    """
    failure: Exception | None = None
    mine: tuple[_T | None, str | None]
    try:
        mine = step(), None
    except Exception as error:  # noqa: BLE001 - the other ranks have to learn of any error
        failure = error
        mine = None, f"{type(error).__name__}: {error}"
    results = _interop.all_gather_objects(mine, group)
    failed = [f"rank {rank} ({text})" for rank, (_, text) in enumerate(results) if text is not None]
    if failed:
        raise ValueError(f"all_gather failed before any tensor was sent, on {', '.join(failed)}.") from failure
    return [value for value, _ in results]


def _check_alike(signatures: tuple[dict[str, tuple[Any, ...]], ...]) -> None:
    if any(set(other) != set(signatures[0]) for other in signatures):
        raise ValueError(f"Ranks have different keys: {[sorted(other) for other in signatures]}.")
    for key in signatures[0]:
        if len({(*other[key][:-1], len(other[key][-1])) for other in signatures}) > 1:
            raise ValueError(f"Ranks have different leaves {key!r}: {[other[key] for other in signatures]}.")
