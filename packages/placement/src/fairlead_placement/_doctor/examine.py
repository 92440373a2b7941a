# SPDX-License-Identifier: Apache-2.0
"""Examines a cluster: asks it for facts, and decides from them what is wrong."""

import contextlib
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from .._nodes.agent import NodeAgent, run_on_nodes
from .._nodes.directory import compare_clocks
from .._nodes.head import ask_head
from .._nodes.ports import PORT_HIGH, PORT_LOW, PortLease
from .._ray_private import accelerator_names, draining_nodes
from . import probe

ACCELERATORS = tuple(sorted(accelerator_names()))
CLOCK_S = 1.0
# A healthy head answers in about a millisecond. Every actor and placement group takes several of its answers.
HEAD_S = 0.25
# How many nodes connect to each other.
SAMPLE = 8
CONNECT_S = 3.0
# From the moment the first node listens until the last one has tried to connect.
LISTEN_S = 15.0
ray.cloudpickle.register_pickle_by_value(probe)


# A connection from a node to a port of another one, and its error, or "".
_Try = tuple[str, str, int, str]


@dataclass(frozen=True)
class Expected:
    """The expected cluster: how many nodes (None for any), and how much of some resources on each of them."""

    nodes: int | None = None
    each: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFacts:
    """The facts about one node.

    `probe` is what `look_at_node` returned there, or the exception; None if the node was not asked. `clock` is how far
    its clock is ahead of this machine's, and the error of that; None if it is unknown.
    """

    node_id: str
    address: str
    state: str
    resources: Mapping[str, float]
    probe: Any = None
    clock: tuple[float, float] | None = None


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


def examine_cluster(expected: Expected, *, timeout_s: float = 60.0) -> tuple[Check, ...]:
    """Check the cluster that this process is attached to. All nodes together may take `timeout_s` for each request."""
    began = time.monotonic()
    rows = ask_head("list the nodes", ray.nodes, timeout_s=timeout_s)
    head_s = time.monotonic() - began
    leaving = ask_head("list the draining nodes", draining_nodes, timeout_s=timeout_s)
    states = dict.fromkeys(leaving, "draining") | {row["NodeID"]: "dead" for row in rows if not row["Alive"]}
    alive = [row["NodeID"] for row in rows if row["NodeID"] not in states]
    probes = run_on_nodes(probe.look_at_node, dict.fromkeys(alive, ()), timeout_s=timeout_s)
    clocks = {one: _compare_clock(one, timeout_s) for one in alive if not isinstance(probes[one], Exception)}
    nodes = {
        one: NodeFacts(one, address, states.get(one, "alive"), resources, probes.get(one), clocks.get(one))
        for one, address, resources in ((row["NodeID"], row["NodeManagerAddress"], row["Resources"]) for row in rows)
    }
    chosen = random.sample(list(clocks), min(SAMPLE, len(clocks)))
    tries = _connect_pairs({node_id: nodes[node_id].address for node_id in chosen}, timeout_s)
    return judge(expected, list(nodes.values()), head_s, tries)


def _compare_clock(node_id: str, timeout_s: float) -> tuple[float, float] | None:
    ask = {node_id: ()}
    return compare_clocks(lambda: run_on_nodes(time.time, ask, timeout_s=timeout_s)[node_id], time.time)


def _connect_pairs(address: dict[str, str], timeout_s: float) -> list[_Try]:
    """Have each node listen at a leased port, and all others connect to it."""
    ports: dict[str, int] = {}
    tries: list[_Try] = []
    with contextlib.ExitStack() as leases:
        for node_id in address:
            found, _, _ = NodeAgent(node_id, timeout_s=timeout_s).lease(1, PORT_LOW, PORT_HIGH)
            for port, lease_id in found:
                leases.enter_context(PortLease(address[node_id], port, node_id, lease_id))
                ports[node_id] = port
        listening = {node_id: (port, LISTEN_S) for node_id, port in ports.items()}
        run_on_nodes(probe.listen, listening, timeout_s=timeout_s)
        targets = {here: [there for there in ports if there != here] for here in address}
        asks = {here: ([(address[to], ports[to]) for to in there], CONNECT_S) for here, there in targets.items()}
        errors = run_on_nodes(probe.try_to_connect, asks, timeout_s=timeout_s)
    for here, found_errors in errors.items():
        if isinstance(found_errors, Exception):
            found_errors = [str(found_errors)] * len(targets[here])
        tries += [(here, to, ports[to], error) for to, error in zip(targets[here], found_errors, strict=True)]
    return tries


def judge(expected: Expected, nodes: Sequence[NodeFacts], head_s: float, tries: Sequence[_Try]) -> tuple[Check, ...]:
    """Return the outcome of every check, in a fixed order. `head_s` is the time in which Ray's head answered."""
    alive = [node for node in nodes if node.state == "alive"]
    probed = [node for node in alive if not isinstance(node.probe, Exception)]
    return (
        _check_nodes(nodes, len(alive), expected.nodes),
        _check_agents(alive),
        _check_accelerators(alive, dict(expected.each)),
        _check_versions(probed),
        _check_clocks(alive),
        _check_shared_memory(probed),
        _check_ports(nodes, tries),
        _check_head(head_s),
    )


def _fault(node: NodeFacts, what: str, remedy: str) -> Fault:
    return Fault(f"node {node.node_id[:8]} ({node.address}) {what}", remedy, node.node_id, node.address)


def _check_nodes(nodes: Sequence[NodeFacts], alive: int, expected: int | None) -> Check:
    counts = Counter(node.state for node in nodes)
    faults = []
    if expected is not None and alive != expected:
        gone = ", ".join(f"{node.address} ({node.state})" for node in nodes if node.state != "alive")
        what = f"{alive} nodes are alive, {expected} were expected" + (f"; not alive: {gone}" if gone else "")
        remedy = (
            "Start the missing nodes with `ray start --address=...` and read their logs; nodes too many belong to "
            "another job or to a cluster that was not ended."
        )
        faults.append(Fault(what, remedy))
    faults += [
        _fault(node, "is draining: it ends soon", "Replace it, or start the job without it.")
        for node in nodes
        if node.state == "draining"
    ]
    found = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"
    return Check("nodes", found, tuple(faults))


def _check_agents(alive: Sequence[NodeFacts]) -> Check:
    remedy = "Look at the load and the memory of the node, and at Ray's logs there."
    faults = tuple(
        _fault(node, f"did not answer: {str(node.probe).splitlines()[0]}", remedy)
        for node in alive
        if isinstance(node.probe, Exception)
    )
    return Check("agents", f"{len(alive) - len(faults)} of {len(alive)} nodes answer", faults)


def _check_accelerators(nodes: Sequence[NodeFacts], each: dict[str, float]) -> Check:
    names = dict.fromkeys((*ACCELERATORS, *each))
    has = {node.node_id: {name: node.resources.get(name, 0.0) for name in names} for node in nodes}
    total = {name: sum(amounts[name] for amounts in has.values()) for name in names}
    if not each and any(total.values()):
        # Most nodes with accelerators are right. Nodes without any, such as a head, are left out.
        nodes = [node for node in nodes if any(has[node.node_id].values())]
        each = dict(Counter(tuple(has[node.node_id].items()) for node in nodes).most_common(1)[0][0])
    faults = []
    for node in nodes:
        less = {name: amount for name, amount in has[node.node_id].items() if amount < each.get(name, 0.0)}
        if less:
            what = f"has {_list(less)} instead of {', '.join(f'{each[name]:g}' for name in less)}"
            remedy = "Look at the driver of the device (nvidia-smi), and at what `ray start` was given."
            faults.append(_fault(node, what, remedy))
    found = _list({name: amount for name, amount in total.items() if amount}) or "none"
    return Check("accelerators", found, tuple(faults))


def _list(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _check_versions(nodes: Sequence[NodeFacts]) -> Check:
    remedy = "Install one version everywhere: workers and drivers of different versions cannot exchange objects."
    mine = {"ray": ray.__version__, "python": platform.python_version()}
    faults = tuple(
        _fault(node, f"runs {what.capitalize()} {node.probe[what]}, this process {mine[what]}", remedy)
        for what in ("ray", "python")
        for node in nodes
        if node.probe[what] != mine[what]
    )
    return Check("versions", f"Ray {mine['ray']}, Python {mine['python']}", faults)


def _check_clocks(nodes: Sequence[NodeFacts]) -> Check:
    known = [(node, *node.clock) for node in nodes if node.clock is not None]
    if not known:
        return Check("clocks", "unknown")
    middle = statistics.median_low(ahead for _, ahead, _ in known)
    faults = tuple(
        _fault(
            node, f"has a clock that is {abs(s):.1f} s {'ahead of' if s > 0 else 'behind'} the others", "Start chronyd."
        )
        for node, ahead, error in known
        if abs(s := ahead - middle) - error > CLOCK_S
    )
    spread = max(ahead for _, ahead, _ in known) - min(ahead for _, ahead, _ in known)
    error = max(error for *_, error in known)
    return Check("clocks", f"within {spread:.2f} s (measured to {error:.3f} s)", faults)


def _check_shared_memory(nodes: Sequence[NodeFacts]) -> Check:
    remedy = (
        "Give the container more (`docker run --shm-size`), or `ray start --object-store-memory` less: Ray otherwise "
        "keeps objects on disk, or the node fails when the store fills."
    )
    sizes = [(node, node.probe["shm_bytes"]) for node in nodes]
    faults = tuple(
        _fault(node, f"has {_size(size)} in /dev/shm, less than the object store of {_size(store)}", remedy)
        for node, size in sizes
        if size < (store := node.resources.get("object_store_memory", 0.0))
    )
    found = f"/dev/shm has {_size(min(size for _, size in sizes))} or more" if sizes else "unknown"
    return Check("shared memory", found, faults)


def _size(amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"


def _check_ports(nodes: Sequence[NodeFacts], tries: Sequence[_Try]) -> Check:
    by_id = {node.node_id: node for node in nodes}
    remedy = "Open the ports that jobs lease (1400-1999 by default) between all nodes: process groups use them."
    faults = tuple(
        _fault(by_id[here], f"cannot connect to {by_id[there].address}:{port}: {error}", remedy)
        for here, there, port, error in tries
        if error
    )
    return Check("ports", f"{len(tries) - len(faults)} of {len(tries)} pairs of nodes connect", faults)


def _check_head(took_s: float) -> Check:
    took_ms = took_s * 1000
    fault = Fault(
        f"Ray's head (GCS) takes {took_ms:.0f} ms to answer",
        "Look at the load of the head node: no workers should run there.",
    )
    return Check("head", f"answers in {took_ms:.1f} ms", (fault,) if took_s > HEAD_S else ())
