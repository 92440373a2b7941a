# SPDX-License-Identifier: Apache-2.0
"""Decides what is wrong, from facts about the nodes. Imports no Ray."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ACCELERATORS = ("GPU", "TPU", "neuron_cores", "HPU", "NPU")
CLOCK_S = 1.0
# A healthy head answers in about a millisecond. Every actor and placement group takes several of its answers.
HEAD_S = 0.25


@dataclass(frozen=True)
class Expected:
    """What the cluster should have: how many nodes (None for any), and how much of some resources on each of them."""

    nodes: int | None = None
    each: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFacts:
    """The facts about one node.

    `probe` is what `look_at_node` returned; None if the node did not answer, and `error` then says why. `clock_s` is
    how far its clock is ahead of this machine's; None if that is unknown. `clock_error_s` is the error of `clock_s`.
    """

    node_id: str
    address: str
    state: str
    resources: Mapping[str, float]
    probe: Mapping[str, Any] | None = None
    error: str = ""
    clock_s: float | None = None
    clock_error_s: float = 0.0


@dataclass(frozen=True)
class Facts:
    """The facts about a cluster.

    `head_s` is the median time in which Ray's head answered. Of the `pairs` of nodes that were tried, `refused` lists
    those that could not connect, as (from, to, port, error).
    """

    nodes: Sequence[NodeFacts]
    driver: Mapping[str, str]
    head_s: float
    refused: Sequence[tuple[str, str, int, str]] = ()
    pairs: int = 0
    expected: Expected = field(default_factory=Expected)


@dataclass(frozen=True)
class Fault:
    """Something that is wrong: what was found, what to do about it, and the node if it is the fault of one."""

    what: str
    remedy: str
    node_id: str = ""
    address: str = ""


@dataclass(frozen=True)
class Check:
    """The outcome of one check, with a line for people about what was found."""

    name: str
    found: str
    faults: tuple[Fault, ...] = ()


def judge(facts: Facts) -> tuple[Check, ...]:
    """Return the outcome of every check, in a fixed order."""
    checks = (_nodes, _answers, _accelerators, _versions, _clocks, _shared_memory, _ports, _caches, _head)
    return tuple(check(facts) for check in checks)


def _fault(node: NodeFacts, what: str, remedy: str) -> Fault:
    return Fault(f"node {node.node_id[:8]} ({node.address}) {what}", remedy, node.node_id, node.address)


def _alive(facts: Facts) -> list[NodeFacts]:
    return [node for node in facts.nodes if node.state == "alive"]


def _probed(facts: Facts) -> list[tuple[NodeFacts, Mapping[str, Any]]]:
    return [(node, node.probe) for node in _alive(facts) if node.probe is not None]


def _nodes(facts: Facts) -> Check:
    alive, expected = _alive(facts), facts.expected.nodes
    counts = Counter(node.state for node in facts.nodes)
    faults = []
    if expected is not None and len(alive) != expected:
        gone = ", ".join(f"{node.address} ({node.state})" for node in facts.nodes if node.state != "alive")
        faults.append(
            Fault(
                f"{len(alive)} nodes are alive, {expected} were expected" + (f"; not alive: {gone}" if gone else ""),
                "Start the missing nodes with `ray start --address=...` and read their logs; nodes too many belong to "
                "another job or to a cluster that was not ended.",
            )
        )
    faults += [
        _fault(node, "is draining: it ends soon", "Replace it, or start the job without it.")
        for node in facts.nodes
        if node.state == "draining"
    ]
    found = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"
    return Check("nodes", found, tuple(faults))


def _answers(facts: Facts) -> Check:
    silent = [node for node in _alive(facts) if node.probe is None]
    remedy = "Look at the load and the memory of the node, and at Ray's logs there."
    faults = tuple(_fault(node, f"did not answer: {node.error}", remedy) for node in silent)
    return Check("agents", f"{len(_alive(facts)) - len(silent)} of {len(_alive(facts))} nodes answer", faults)


def _accelerators(facts: Facts) -> Check:
    alive, each = _alive(facts), dict(facts.expected.each)
    faults = []
    held = [{name: node.resources.get(name, 0.0) for name in ACCELERATORS} for node in alive]
    if not each and any(any(amounts.values()) for amounts in held):
        # Most nodes with accelerators are right. Nodes without any, such as a head, are left out.
        usual = Counter(tuple(amounts.values()) for amounts in held if any(amounts.values())).most_common(1)[0][0]
        each = {name: amount for name, amount in zip(ACCELERATORS, usual, strict=True) if amount}
        alive = [node for node, amounts in zip(alive, held, strict=True) if any(amounts.values())]
    for node in alive:
        less = {name: node.resources.get(name, 0.0) for name in each if node.resources.get(name, 0.0) < each[name]}
        if less:
            wants = ", ".join(f"{each[name]:g}" for name in less)
            remedy = "Look at the driver of the device (nvidia-smi), and at what `ray start` was given."
            has = ", ".join(f"{amount:g} {name}" for name, amount in less.items())
            faults.append(_fault(node, f"has {has} instead of {wants}", remedy))
    names = [*ACCELERATORS, *(name for name in facts.expected.each if name not in ACCELERATORS)]
    total = {name: sum(node.resources.get(name, 0.0) for node in _alive(facts)) for name in names}
    found = ", ".join(f"{amount:g} {name}" for name, amount in total.items() if amount) or "none"
    return Check("accelerators", found, tuple(faults))


def _versions(facts: Facts) -> Check:
    faults = []
    for what in ("ray", "python"):
        mine = facts.driver[what]
        faults += [
            _fault(
                node,
                f"runs {what.capitalize()} {probe[what]}, this process {mine}",
                "Install one version everywhere: workers and drivers of different versions cannot exchange objects.",
            )
            for node, probe in _probed(facts)
            if probe[what] != mine
        ]
    return Check("versions", f"Ray {facts.driver['ray']}, Python {facts.driver['python']}", tuple(faults))


def _clocks(facts: Facts) -> Check:
    known = [(node, node.clock_s) for node in _alive(facts) if node.clock_s is not None]
    if not known:
        return Check("clocks", "unknown")
    middle = statistics.median_low(sorted(offset for _, offset in known))
    faults = tuple(
        _fault(
            node,
            f"has a clock that is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others",
            "Start chronyd or ntpd.",
        )
        for node, offset in known
        if abs(ahead := offset - middle) - node.clock_error_s > CLOCK_S
    )
    spread = max(offset for _, offset in known) - min(offset for _, offset in known)
    return Check(
        "clocks", f"within {spread:.2f} s (measured to {max(n.clock_error_s for n, _ in known):.3f} s)", faults
    )


def _shared_memory(facts: Facts) -> Check:
    faults = []
    sizes = []
    for node, probe in _probed(facts):
        store = node.resources.get("object_store_memory", 0.0)
        sizes.append(probe["shm_bytes"])
        if probe["shm_bytes"] < store:
            faults.append(
                _fault(
                    node,
                    f"has {_size(probe['shm_bytes'])} in /dev/shm, less than the object store of {_size(store)}",
                    "Give the container more (`docker run --shm-size`), or `ray start --object-store-memory` less: Ray "
                    "otherwise keeps objects on disk, or the node fails when the store fills.",
                )
            )
    return Check("shared memory", f"/dev/shm has {_size(min(sizes))} or more" if sizes else "unknown", tuple(faults))


def _size(amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"


def _ports(facts: Facts) -> Check:
    by_id = {node.node_id: node for node in facts.nodes}
    faults = tuple(
        _fault(
            by_id[here],
            f"cannot connect to {by_id[there].address}:{port}: {error}",
            "Open the ports that jobs lease (1400-1999 by default) between all nodes: process groups use them.",
        )
        for here, there, port, error in facts.refused
    )
    return Check("ports", f"{facts.pairs - len(faults)} of {facts.pairs} pairs of nodes connect", faults)


def _caches(facts: Facts) -> Check:
    faults = tuple(
        _fault(
            node,
            f"has uv's cache ({probe['uv_cache']}) and the environments ({probe['venvs']}) on different file systems",
            "Set UV_CACHE_DIR and FAIRLEAD_VENV_DIR to folders of one file system: uv then links files instead of "
            "copying gigabytes.",
        )
        for node, probe in _probed(facts)
        if not probe["same_device"]
    )
    return Check("uv cache", "on the file system of the environments" if not faults else "elsewhere", faults)


def _head(facts: Facts) -> Check:
    faults: tuple[Fault, ...] = ()
    if facts.head_s > HEAD_S:
        what = f"Ray's head (GCS) takes {facts.head_s * 1000:.0f} ms to answer"
        faults = (Fault(what, "Look at the load of the head node: no workers should run there."),)
    return Check("head", f"answers in {facts.head_s * 1000:.1f} ms", faults)
