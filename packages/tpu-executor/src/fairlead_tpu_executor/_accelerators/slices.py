# SPDX-License-Identifier: Apache-2.0
"""Whole slices, found from the labels and resources of nodes. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlead_placement import Node
from fairlead_placement.extension import count_bundles, group_pairs

from .tpu_types import GENERATIONS, TpuType, canonical_name

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
TOPOLOGY = "ray.io/tpu-topology"
TYPE = "ray.io/tpu-pod-type"
_ZONE = "ray.io/availability-zone"


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
        head_resource: the resource that only worker 0 has, and that the user of the slice reserves; empty if there is
            none.
        zone: the availability zone; empty if the hosts have no label for it.
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
    zone: str = ""


@dataclass(frozen=True)
class SliceShortage:
    """Why a slice cannot be used.

    Attributes:
        slice_name: the name of the slice.
        reason: the missing or wrong part.

    >>> print(SliceShortage("slice-1", "1 of 2 hosts, worker 1 is missing"))
    slice-1: 1 of 2 hosts, worker 1 is missing
    """

    slice_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.slice_name}: {self.reason}"


@dataclass(frozen=True)
class Survey:
    """The slices of one type that can be used, in the order of their names, and why each of the others cannot."""

    intact: tuple[SliceInfo, ...] = ()
    lacking: tuple[SliceShortage, ...] = ()


def find_type(nodes: Sequence[Node], generation: str) -> str:
    """Return the type of the slices of a generation, if they have only one; ValueError with all types otherwise."""
    types = sorted({canonical_name(node.labels[TYPE]) for node in nodes if TYPE in node.labels})
    found = [one for one in types if one.startswith(f"{canonical_name(generation)}-")]
    if len(found) != 1:
        raise ValueError(
            f"{generation!r} is a generation of TPUs without a size, which works if the cluster has slices of only one "
            f"type of it. The cluster has {', '.join(types) or 'no slices'}. Give the type, such as 'v4-16'."
        )
    return found[0]


def find_slices(nodes: Sequence[Node], wanted: TpuType) -> Survey:
    """Return the slices of a type among nodes that are alive and not draining."""
    assessed = [one for one, _ in assess_slices(nodes, wanted)]
    return Survey(
        tuple(one for one in assessed if isinstance(one, SliceInfo)),
        tuple(one for one in assessed if isinstance(one, SliceShortage)),
    )


def assess_slices(nodes: Sequence[Node], wanted: TpuType) -> list[tuple[SliceInfo | SliceShortage, list[Node]]]:
    """Return each slice with at least one host of the type, or what is wrong with it, with its hosts, by name."""
    named = group_pairs((node.labels.get(SLICE_NAME, ""), node) for node in nodes if TYPE in node.labels)
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
    return [(_assess(name, chosen[name], wanted), chosen[name]) for name in sorted(chosen, key=_natural_key)]


def _natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts slice-2 before slice-10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)


def _assess(name: str, hosts: Sequence[Node], wanted: TpuType) -> SliceInfo | SliceShortage:
    """Return the slice if these hosts are all of it and match the type; otherwise what is wrong."""
    if wanted.hosts > 1 and not all(node.labels.get(SLICE_NAME) for node in hosts):
        return SliceShortage(name, "no label tells which of them form a slice")
    types = sorted({canonical_name(node.labels.get(TYPE, "")) for node in hosts})
    topologies = sorted({node.labels.get(TOPOLOGY, "") for node in hosts})
    if len(types) > 1 or len(topologies) > 1:
        different = ", ".join(types if len(types) > 1 else topologies)
        return SliceShortage(name, f"its hosts have different labels: {different}")
    if wanted.topology and topologies[0] != wanted.topology:
        return SliceShortage(name, f"its topology is {topologies[0] or 'unknown'}, not {wanted.topology}")
    texts = [node.labels.get(WORKER_ID, "0" if wanted.hosts == 1 else "") for node in hosts]
    ids = [int(text) if text.isdigit() else None for text in texts]
    if problem := _check_worker_ids(ids, wanted.hosts):
        return SliceShortage(name, problem)
    amounts = sorted({int(node.total.get("TPU", 0)) for node in hosts})
    per_host = wanted.chips_per_host
    if len(amounts) > 1 or amounts[0] not in (per_host, per_host * GENERATIONS[wanted.generation].cores_per_chip):
        have = ", ".join(map(str, amounts))
        return SliceShortage(name, f"its hosts have {have} TPU, {wanted.name} has {per_host} on each (chips_per_vm)")
    ordered = [node for _, node in sorted(zip(ids, hosts, strict=True), key=lambda pair: pair[0] or 0)]
    first = ordered[0]
    return SliceInfo(
        slice_name=name,
        num_hosts=len(ordered),
        ip_address=first.ip,
        num_accelerators_per_host=amounts[0],
        node_ids=tuple(node.node_id for node in ordered),
        node_ips=tuple(node.ip for node in ordered),
        kind=wanted.name,
        topology=topologies[0],
        head_resource=next((one for one in sorted(first.total) if re.fullmatch("TPU-.*-head", one)), ""),
        zone=first.labels.get(_ZONE, ""),
    )


def _check_worker_ids(ids: Sequence[int | None], expected: int) -> str:
    """Return why these worker ids are not 0 to `expected` - 1; empty if they are."""
    known = [one for one in ids if one is not None]
    if len(known) < len(ids):
        return f"{len(ids) - len(known)} of its hosts have no label {WORKER_ID}"
    if twice := sorted({one for one in known if known.count(one) > 1}):
        return f"several of its hosts are worker {', '.join(map(str, twice))}"
    if beyond := sorted(one for one in known if one >= expected):
        return f"it has a worker {', '.join(map(str, beyond))}, but a whole slice has {expected} host(s)"
    gone = sorted(set(range(expected)) - set(known))
    return f"{len(known)} of {expected} hosts, worker {', '.join(map(str, gone))} is missing" if gone else ""


def find_room(nodes: Sequence[Node], bundle: Mapping[str, float], count: int, kind: str) -> Survey:
    """Return what stands for a slice where there are no TPUs: `count` bundles on the first nodes with room for them."""
    chosen: list[Node] = []
    for node in nodes:
        chosen += [node] * min(count_bundles(bundle, node.free), count - len(chosen))
    if len(chosen) < count:
        each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        return Survey(lacking=(SliceShortage(kind, f"room for {len(chosen)} of {count} workers of {each} each"),))
    ids, ips = tuple(node.node_id for node in chosen), tuple(node.ip for node in chosen)
    return Survey(intact=(SliceInfo(kind, count, ips[0], int(bundle.get("GPU", 0)), ids, ips, kind),))
