# SPDX-License-Identifier: Apache-2.0
"""The values that a reservation is planned with: nodes, requests for bundles, and their checks."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, get_args

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
Verdict = Literal["fits", "taken", "impossible"]
# Ray keeps amounts of resources in ten-thousandths.
PRECISION = 10_000
# Ray gives a node a resource of this name for the model of its accelerators, such as "accelerator_type:A100".
ACCELERATOR_TYPE = "accelerator_type:"


@dataclass(frozen=True)
class Node:
    """A node that is alive.

    Attributes:
        node_id: Ray's id of it, hexadecimal.
        ip: its address.
        total: what it has of each resource.
        free: the free amount of each resource. A resource that is used up may be missing.
        labels: its labels.
    """

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Ask:
    """A request for one logical node: `count` bundles on nodes with these labels."""

    node_idx: int
    count: int
    bundle: Mapping[str, float]
    strategy: Strategy = "STRICT_PACK"
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that a virtual cluster is to reserve."""

    asks: tuple[Ask, ...]  # one for each logical node, also for those that are not in use
    name: str
    capacity: int  # how many worker groups may share a slot
    accelerators: Mapping[str, float]  # of a bundle
    segment_size: int | None = None
    gpu_ids: Mapping[int, frozenset[str]] = field(default_factory=dict)  # by logical node; empty if any GPUs will do
    timeout_s: float
    wait_for_nodes_s: float
    unified: bool = False  # one placement group in all, with each logical node on a physical node of its own


class ClusterConfig(TypedDict):
    """The argument of `RayVirtualCluster.from_config`.

    Attributes:
        gpus_per_node: the number of bundles of each logical node.
        num_nodes: the number of logical nodes.
        master_port_range_low: the cluster's `port_range_low`.
        master_port_range_high: the cluster's `port_range_high`.
        segment_size: the cluster's `segment_size`.
    """

    gpus_per_node: int
    num_nodes: int
    master_port_range_low: NotRequired[int | None]
    master_port_range_high: NotRequired[int | None]
    segment_size: NotRequired[int | None]


def group_pairs(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, keys and values in the order of the pairs."""
    grouped: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        grouped.setdefault(key, []).append(value)
    return grouped


def format_coords(coords: Mapping[str, int]) -> str:
    """Return coordinates in parentheses after a space; an empty text for none."""
    return f" ({', '.join(f'{axis}={index}' for axis, index in coords.items())})" if coords else ""


def count_bundles(bundle: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    """Return how many such bundles fit into amounts of resources, by Ray's precision; 0 for an empty bundle."""
    units = {name: round(amount * PRECISION) for name, amount in bundle.items()}
    return min((round(amounts.get(name, 0) * PRECISION) // unit for name, unit in units.items() if unit), default=0)


def check_positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, 0 or more and finite, got {value!r}")
    return float(value)


def _check_accelerators(accelerators: Any, use_gpus: bool, capacity: int) -> dict[str, float]:
    """Return the accelerators that a bundle holds, of which each of `capacity` workers gets the same part."""
    if "GPU" in accelerators and not use_gpus:
        raise ValueError(f"accelerators={accelerators!r} has GPUs, and use_gpus=False none: leave use_gpus out")
    if "CPU" in accelerators:
        raise ValueError(f"accelerators={accelerators!r} has CPUs: give cpus_per_worker instead")
    for name, amount in accelerators.items():
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 < amount < math.inf:
            raise ValueError(f"accelerators must have positive, finite amounts, got {name!r}: {amount!r}")
        # Ray divides a device, and gives no process parts of several. Parts of other sizes would not fill a device.
        parts = max(amount / capacity, capacity / amount)
        if abs(parts - round(parts)) > 1e-3 * parts:
            raise ValueError(
                f"accelerators={accelerators!r} gives each of {capacity} worker(s) {amount / capacity:g} {name}, which "
                "must be a whole number, or 1/2, 1/3, ... of a device"
            )
    return {name: float(amount) for name, amount in accelerators.items()}


def _check_segments(size: Any, used: int, strategy: str) -> None:
    """Refuse a number of logical nodes that are to share a topology domain, of those that are in use."""
    check_positive("segment_size", size)
    if strategy != "STRICT_PACK":
        raise ValueError(f"segment_size needs placement_group_strategy='STRICT_PACK', got {strategy!r}")
    if used % size:
        raise ValueError(f"{used} logical nodes in use are not a multiple of segment_size={size}")


def make_request(
    counts: Any,
    *,
    capacity: int,
    cpus_per_worker: int,
    strategy: Strategy,
    use_gpus: bool,
    accelerators: Mapping[str, float] | None,
    labels: Mapping[str, str] | None,
    constraints: Sequence[Mapping[str, float]] | None,
    gpu_ids: Any,
    segment_size: Any,
    **checked: Any,
) -> Request:
    """Return the request of a cluster from the arguments of its constructor, once those are checked that are not."""
    if not isinstance(counts, (list, tuple)) or not counts:
        raise ValueError(f"bundle_ct_per_node_list must be a list with an entry per logical node, got {counts!r}")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"bundle counts must be integers, 0 or more, got {count!r} in {counts!r}")
    if strategy not in STRATEGIES:
        raise ValueError(f"placement_group_strategy must be one of {list(STRATEGIES)}, got {strategy!r}")
    held = {"GPU": 1.0} if use_gpus else {}
    if accelerators is not None:
        held = _check_accelerators(accelerators, use_gpus, capacity)
    bundle = {"CPU": float(capacity * cpus_per_worker), **held}
    for key, value in (labels or {}).items():
        if not isinstance(key, str) or not isinstance(value, str) or not re.fullmatch(r"[\w.-]*", value):
            raise ValueError(f"label_selector maps a label to the value that nodes must have, got {key!r}: {value!r}")
    extras = [{}] * len(counts) if constraints is None else [extra or {} for extra in constraints]
    if len(extras) != len(counts):
        raise ValueError(f"node_resource_constraints has {len(extras)} entries for {len(counts)} logical nodes")
    for what, amount in (item for extra in extras for item in extra.items()):
        if what in ("CPU", "GPU") or not 0 < amount < math.inf:
            raise ValueError(
                f"node_resource_constraints may hold positive, finite amounts of resources other than CPU and GPU, "
                f"got {what!r}: {amount!r}"
            )
    if segment_size is not None:
        _check_segments(segment_size, sum(map(bool, counts)), strategy)
    wanted = {} if gpu_ids is None else _check_gpu_ids(gpu_ids, counts, held.get("GPU", 0), strategy, segment_size)
    asks = [
        Ask(index, count, {**bundle, **extra}, strategy, dict(labels or {}))
        for index, (count, extra) in enumerate(zip(counts, extras, strict=True))
    ]
    return Request(
        asks=tuple(asks),
        capacity=capacity,
        accelerators=held,
        gpu_ids=wanted,
        segment_size=segment_size,
        **checked,
    )


def _check_gpu_ids(
    gpu_ids: Any, counts: Sequence[int], gpus: float, strategy: str, segment_size: int | None
) -> dict[int, frozenset[str]]:
    """Return the ids that the argument `gpu_ids` of a cluster names, by logical node in use."""
    if gpus != 1 or strategy != "STRICT_PACK" or segment_size is not None:
        raise ValueError(
            f"gpu_ids={gpu_ids!r} needs one GPU in each bundle (use_gpus=True), placement_group_strategy='STRICT_PACK' "
            f"and no segment_size, got {gpus:g}, {strategy!r} and {segment_size!r}"
        )
    if not isinstance(gpu_ids, (list, tuple)):
        raise ValueError(f"gpu_ids must be a list of ids, a list per logical node, or 'auto', got {gpu_ids!r}")
    used = [node_idx for node_idx, count in enumerate(counts) if count > 0]
    is_nested = any(isinstance(part, (list, tuple)) for part in gpu_ids)
    per_node = list(gpu_ids) if is_nested else [gpu_ids if count else [] for count in counts]
    if len(per_node) != len(counts) or not (is_nested or len(used) == 1):
        raise ValueError(f"gpu_ids must be a list for each of the {len(counts)} logical nodes, got {gpu_ids!r}")
    for node_idx, (ids, count) in enumerate(zip(per_node, counts, strict=True)):
        if not isinstance(ids, (list, tuple)) or len(set(map(str, ids))) != count or len(ids) != count:
            raise ValueError(
                f"gpu_ids of logical node {node_idx} must be {count} different ids, one for each bundle, got {ids!r}"
            )
        for gpu in ids:
            if isinstance(gpu, bool) or not isinstance(gpu, (int, str)) or gpu == "" or str(gpu).startswith("-"):
                raise ValueError(
                    f"gpu_ids must be numbers, 0 or more, or names such as 'GPU-6a', got {gpu!r} in {ids!r}"
                )
    return {node_idx: frozenset(map(str, per_node[node_idx])) for node_idx in used}
