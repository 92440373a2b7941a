# SPDX-License-Identifier: Apache-2.0
"""Which slices are whole, read from the labels and resources of nodes. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fairlead_placement import Node

from .tpu_types import TpuType, canonical_name

__all__ = ["SLICE_NAME", "Found", "SliceInfo", "SliceLack", "TOPOLOGY", "TYPE", "WORKER_ID", "assess", "find_slices"]

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
TOPOLOGY = "ray.io/tpu-topology"
TYPE = "ray.io/tpu-pod-type"
_ZONE = "ray.io/availability-zone"


@dataclass(frozen=True)
class SliceInfo:
    """A whole slice: its hosts, in the order of their TPU worker ids.

    Attributes:
        slice_name: its name; for a single host that has none, the node's.
        kind: its type, such as "v4-16".
        topology: such as "2x2x2"; empty if the hosts do not say.
        node_ids: Ray's ids of the hosts.
        node_ips: addresses of the hosts.
        num_accelerators_per_host: what Ray counts as TPU (or GPU) on each host.
        head_resource: the resource that only worker 0 has, and that whoever uses the slice holds; empty without one.
        zone: where it is; empty if the hosts do not say.
    """

    slice_name: str
    kind: str
    topology: str
    node_ids: tuple[str, ...]
    node_ips: tuple[str, ...]
    num_accelerators_per_host: int
    head_resource: str = ""
    zone: str = ""

    @property
    def num_hosts(self) -> int:
        """How many hosts it has."""
        return len(self.node_ids)

    @property
    def ip_address(self) -> str:
        """The address of worker 0."""
        return self.node_ips[0]


@dataclass(frozen=True)
class SliceLack:
    """Why a slice cannot be used.

    Attributes:
        slice_name: its name.
        what: what it lacks.

    >>> print(SliceLack("slice-1", "1 of 2 hosts, worker 1 is not there"))
    slice-1: 1 of 2 hosts, worker 1 is not there
    """

    slice_name: str
    what: str

    def __str__(self) -> str:
        return f"{self.slice_name}: {self.what}"


@dataclass(frozen=True)
class Found:
    """What there is of a type: whole slices and the others, by name."""

    intact: tuple[SliceInfo, ...] = ()
    lacking: tuple[SliceLack, ...] = field(default=())


def find_slices(nodes: Sequence[Node], wanted: TpuType) -> Found:
    """The slices of a type.

    Args:
        nodes: those that are alive and not about to go.
        wanted: the type.
    """
    found = [assess(name, hosts, wanted) for name, hosts in _by_slice(nodes, wanted).items()]
    return Found(
        tuple(one for one in found if isinstance(one, SliceInfo)),
        tuple(one for one in found if isinstance(one, SliceLack)),
    )


def _by_slice(nodes: Sequence[Node], wanted: TpuType) -> Mapping[str, list[Node]]:
    """The hosts of each slice in which at least one is of the type; in the order of the names."""
    grouped: dict[str, list[Node]] = {}
    for node in nodes:
        if TYPE in node.labels:
            grouped.setdefault(node.labels.get(SLICE_NAME, ""), []).append(node)
    chosen: dict[str, list[Node]] = {}
    for name, hosts in grouped.items():
        if not any(canonical_name(node.labels[TYPE]) == wanted.name for node in hosts):
            continue
        if wanted.hosts == 1 and (not name or len(hosts) > 1):
            # Every single host is a slice, and several may have one name, or none.
            for node in hosts:
                chosen[f"{name}/{node.node_id[:8]}" if name else node.node_id[:8]] = [node]
        else:
            chosen[name or f"hosts without the label {SLICE_NAME}"] = hosts
    return {name: chosen[name] for name in sorted(chosen, key=_natural)}


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """slice-2 before slice-10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)


def assess(name: str, hosts: Sequence[Node], wanted: TpuType) -> SliceInfo | SliceLack:
    """The slice, if these hosts are all of it and fit the type; else what it lacks."""
    if wanted.hosts > 1 and not all(node.labels.get(SLICE_NAME) for node in hosts):
        return SliceLack(name, "nothing says which of them are one slice")
    types = sorted({canonical_name(node.labels.get(TYPE, "")) for node in hosts})
    topologies = sorted({node.labels.get(TOPOLOGY, "") for node in hosts})
    if len(types) > 1 or len(topologies) > 1:
        said = ", ".join(types if len(types) > 1 else topologies)
        return SliceLack(name, f"its hosts say different things of it: {said}")
    if wanted.topology and topologies[0] != wanted.topology:
        return SliceLack(name, f"its topology is {topologies[0] or 'not known'}, not {wanted.topology}")
    ids = [_worker_id(node, wanted) for node in hosts]
    if problem := _not_whole(ids, wanted.hosts):
        return SliceLack(name, problem)
    amounts = sorted({int(node.total.get("TPU", 0)) for node in hosts})
    per_host = wanted.chips_per_host
    if len(amounts) > 1 or amounts[0] not in (per_host, per_host * wanted.cores_per_chip):
        have = ", ".join(map(str, amounts))
        return SliceLack(name, f"its hosts have {have} TPU, {wanted.name} has {per_host} on each (chips_per_vm)")
    ordered = [node for _, node in sorted(zip(ids, hosts, strict=True), key=lambda pair: pair[0] or 0)]
    first = ordered[0]
    return SliceInfo(
        slice_name=name,
        kind=wanted.name,
        topology=topologies[0],
        node_ids=tuple(node.node_id for node in ordered),
        node_ips=tuple(node.ip for node in ordered),
        num_accelerators_per_host=amounts[0],
        head_resource=next((one for one in sorted(first.total) if re.fullmatch("TPU-.*-head", one)), ""),
        zone=first.labels.get(_ZONE, ""),
    )


def _worker_id(node: Node, wanted: TpuType) -> int | None:
    text = node.labels.get(WORKER_ID, "0" if wanted.hosts == 1 else "")
    return int(text) if text.isdigit() else None


def _not_whole(ids: Sequence[int | None], expected: int) -> str:
    """What keeps these worker ids from being 0..expected-1; nothing if they are."""
    known = [one for one in ids if one is not None]
    if len(known) < len(ids):
        return f"{len(ids) - len(known)} of its hosts have no label {WORKER_ID}"
    twice = sorted({one for one in known if known.count(one) > 1})
    if twice:
        return f"several of its hosts are worker {', '.join(map(str, twice))}"
    beyond = sorted(one for one in known if one >= expected)
    if beyond:
        return f"it has a worker {', '.join(map(str, beyond))}, but a whole one has {expected} host(s)"
    gone = sorted(set(range(expected)) - set(known))
    return f"{len(known)} of {expected} hosts, worker {', '.join(map(str, gone))} is not there" if gone else ""
