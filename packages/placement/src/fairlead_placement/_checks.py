# SPDX-License-Identifier: Apache-2.0
"""Checks arguments before anything is requested from Ray."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def check_counts(counts: Any) -> tuple[int, ...]:
    """Return the numbers of bundles per logical node."""
    if not isinstance(counts, (list, tuple)) or not counts:
        raise ValueError(f"bundle_ct_per_node_list must be a list with an entry per logical node, got {counts!r}")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"bundle counts must be integers, 0 or more, got {count!r} in {counts!r}")
    return tuple(counts)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")


def check_positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, 0 or more and finite, got {value!r}")
    return float(value)


def check_segments(size: Any, counts: Sequence[int], strategy: str) -> int | None:
    """Return how many logical nodes share a topology domain, or None if they may use any nodes."""
    if size is None:
        return None
    check_positive("segment_size", size)
    if strategy != "STRICT_PACK":
        raise ValueError(f"segment_size needs placement_group_strategy='STRICT_PACK', got {strategy!r}")
    if len(counts) % size:
        raise ValueError(f"{len(counts)} logical nodes in use are not a multiple of segment_size={size}")
    return int(size)


def check_constraints(extras: Sequence[Mapping[str, float]] | None, nodes: int) -> tuple[dict[str, float], ...]:
    """Return what each bundle of each logical node holds besides CPUs and GPUs."""
    if extras is None:
        return ({},) * nodes
    if len(extras) != nodes:
        raise ValueError(f"node_resource_constraints has {len(extras)} entries for {nodes} logical nodes")
    for extra in extras:
        for name, amount in extra.items():
            if name in ("CPU", "GPU") or not 0 < amount < math.inf:
                raise ValueError(
                    f"node_resource_constraints may hold positive, finite amounts of resources other than CPU and GPU, "
                    f"got {name!r}: {amount!r}"
                )
    return tuple(dict(extra) for extra in extras)
