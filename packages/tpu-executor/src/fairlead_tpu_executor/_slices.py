# SPDX-License-Identifier: Apache-2.0
"""Types of slices, and whole slices among the nodes, recognized by labels and resources. Pure.

A name such as "v4-16" stands for numbers of chips and hosts. These are Google's
(https://cloud.google.com/tpu/docs/regions-zones, "TPU configurations"), as Ray reads them; Ray itself starts from a
topology, of which one type may have several. Nor does Ray say which slices there are and which host of one is missing.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fairlead_placement import Node, extension

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
TOPOLOGY = "ray.io/tpu-topology"
TYPE = "ray.io/tpu-pod-type"
# By generation, how many units of the number in a type make a chip (TensorCores, or chips), and the chips of the
# largest VM; the hosts of larger slices have 4 each.
GENERATIONS = dict.fromkeys(("v2", "v3", "v4", "v5p", "v7x"), (2, 4)) | dict.fromkeys(("v5litepod", "v6e"), (1, 8))
_PATTERN = re.compile(r"(?:tpu-?v?|v)(\d+[a-z]*)(?:-(\d+))?")


@dataclass(frozen=True)
class TpuType:
    """A type of slice. Its name is as in the label `ray.io/tpu-pod-type`; an empty topology stands for any."""

    name: str
    generation: str
    topology: str
    chips: int
    chips_per_host: int

    @property
    def hosts(self) -> int:
        """The number of hosts of a whole slice."""
        return self.chips // self.chips_per_host


def canonical_name(name: str) -> str:
    """Return the one name of a type or generation: "v7x-16" for "TPU7x-16"; other text in lower case."""
    text = name.strip().lower()
    if (match := _PATTERN.fullmatch(text)) is None:
        return text
    generation = "v5litepod" if match[1] == "5e" else f"v{match[1]}"
    return generation + (f"-{int(match[2])}" if match[2] else "")


def tpu_type(name: str, *, topology: str | None = None, chips_per_vm: int | None = None) -> TpuType:
    """Return the type with a name: a generation, and its TensorCores (v2 to v4, v5p, v7x) or chips (v5litepod, v6e)."""
    if not isinstance(name, str):
        raise TypeError(f"A TPU type must be a string such as 'v4-16', got {name!r}.")
    generation, _, size = canonical_name(name).partition("-")
    if generation not in GENERATIONS or not size.isdigit():
        raise ValueError(
            f"{name!r} is not a TPU type. A type is a generation and a size, such as 'v4-16'; the generations are "
            f"{', '.join(GENERATIONS)} (v5e is v5litepod)."
        )
    units, largest_vm = GENERATIONS[generation]
    chips, rest = divmod(int(size), units)
    if chips == 0 or rest:
        raise ValueError(
            f"{name!r} is not a TPU type: the number counts {'chips' if units == 1 else 'TensorCores, 2 per chip'}."
        )
    per_host = chips_per_vm if chips_per_vm is not None else chips if chips <= largest_vm else 4
    possible = [number for number in (1, 2, 4, 8) if number <= largest_vm]
    if isinstance(per_host, bool) or per_host not in possible or chips % per_host:
        raise ValueError(
            f"{name!r} has {chips} chip(s), which hosts of {per_host!r} chips cannot share: a host has "
            f"{' or '.join(map(str, possible))}, and all hosts of a slice have the same number (chips_per_vm)."
        )
    text = "" if topology is None else topology.strip().lower()
    if text and (not re.fullmatch(r"\d+(x\d+)+", text) or math.prod(map(int, text.split("x"))) != chips):
        raise ValueError(
            f"{topology!r} is not a topology of {name!r}, which has {chips} chips. A topology looks like '2x2x2', or "
            "like '2x4' for v2, v3, v5litepod and v6e."
        )
    return TpuType(f"{generation}-{int(size)}", generation, text, chips, per_host)


@dataclass(frozen=True)
class SliceInfo:
    """A whole slice: its hosts, in the order of their TPU worker ids.

    Attributes:
        slice_name: the name of the slice; for a single host without a name, the first characters of the node's id.
        num_hosts: the number of hosts.
        ip_address: the address of worker 0.
        num_accelerators_per_host: the amount of the resource TPU (or GPU) on each host.
        node_ids: Ray's ids of the hosts.
        node_ips: the addresses of the hosts.
        kind: the type of the slice, such as "v4-16".
        topology: the topology, such as "2x2x2"; empty if the hosts have no label for it.
        head_resource: the resource that only worker 0 has, and that the user of the slice reserves; empty for none.
    """

    slice_name: str
    num_hosts: int
    ip_address: str
    num_accelerators_per_host: int
    node_ids: tuple[str, ...] = ()
    node_ips: tuple[str, ...] = ()
    kind: str = ""
    topology: str = ""
    head_resource: str = ""


def find_type(nodes: Sequence[Node], generation: str) -> str:
    """Return the type of the slices of a generation, if they have only one; ValueError with all types otherwise."""
    types = sorted({canonical_name(node.labels[TYPE]) for node in nodes if TYPE in node.labels})
    matching = [kind for kind in types if kind.startswith(f"{canonical_name(generation)}-")]
    if len(matching) != 1:
        raise ValueError(
            f"{generation!r} is a generation of TPUs without a size, which works if the cluster has slices of only one "
            f"type of it. The cluster has {', '.join(types) or 'no slices'}. Give the type, such as 'v4-16'."
        )
    return matching[0]


def assess_slices(nodes: Sequence[Node], wanted: TpuType) -> dict[str, tuple[SliceInfo | str, list[Node]]]:
    """Return each slice with at least one host of the type, or what is wrong with it, and its hosts, by name."""
    named = extension.group_pairs((node.labels.get(SLICE_NAME, ""), node) for node in nodes if TYPE in node.labels)
    chosen: dict[str, list[Node]] = {}
    for name, hosts in named.items():
        if not any(canonical_name(node.labels[TYPE]) == wanted.name for node in hosts):
            continue
        if wanted.hosts == 1 and (not name or len(hosts) > 1):
            # Each single host is a slice, and several hosts may share one name or have none.
            for node in hosts:
                chosen[f"{name}/{node.node_id[:8]}" if name else node.node_id[:8]] = [node]
        else:
            chosen[name or f"hosts without the label {SLICE_NAME}"] = hosts
    return {name: (_assess(name, chosen[name], wanted), chosen[name]) for name in sorted(chosen)}


def _assess(name: str, hosts: Sequence[Node], wanted: TpuType) -> SliceInfo | str:
    """Return the slice if these hosts are all of it and match the type; otherwise what is wrong."""
    ids = [node.labels.get(WORKER_ID, "0" if wanted.hosts == 1 else "") for node in hosts]
    topologies = sorted({node.labels.get(TOPOLOGY, "") for node in hosts})
    types = sorted({canonical_name(node.labels.get(TYPE, "")) for node in hosts})
    amounts = sorted({int(node.total.get("TPU", 0)) for node in hosts})
    per_host, (units, _) = wanted.chips_per_host, GENERATIONS[wanted.generation]
    missing = sorted(set(range(wanted.hosts)) - {int(text) for text in ids if text.isdigit()})
    if wanted.hosts > 1 and not all(node.labels.get(SLICE_NAME) for node in hosts):
        return "no label tells which of them form a slice"
    if len(types) > 1 or len(topologies) > 1:
        return f"its hosts have different labels: {', '.join(types if len(types) > 1 else topologies)}"
    if wanted.topology not in ("", topologies[0]):
        return f"its topology is {topologies[0] or 'unknown'}, not {wanted.topology}"
    if missing and len(set(ids)) == len(ids) == wanted.hosts - len(missing):
        return f"{len(ids)} of {wanted.hosts} hosts, worker {', '.join(map(str, missing))} is missing"
    if missing or len(ids) > wanted.hosts:
        known = ", ".join(sorted(text or "?" for text in ids))
        return f"its hosts have the worker ids {known}, not 0 to {wanted.hosts - 1}"
    if len(amounts) > 1 or amounts[0] not in (per_host, per_host * units):
        have = ", ".join(map(str, amounts))
        return f"its hosts have {have} TPU, {wanted.name} has {per_host} on each (chips_per_vm)"
    ordered = [node for _, node in sorted(zip(map(int, ids), hosts, strict=True), key=lambda pair: pair[0])]
    first = ordered[0]
    return SliceInfo(
        slice_name=name,
        num_hosts=len(ordered),
        ip_address=first.ip,
        num_accelerators_per_host=int(first.total["TPU"]),
        node_ids=tuple(node.node_id for node in ordered),
        node_ips=tuple(node.ip for node in ordered),
        kind=wanted.name,
        topology=topologies[0],
        head_resource=next((name for name in sorted(first.total) if re.fullmatch("TPU-.*-head", name)), ""),
    )
