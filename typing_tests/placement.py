# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-placement as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, assert_type

from ray.util.placement_group import PlacementGroup
from rich.console import RenderableType

from fairlead_placement import (
    ClusterConfig,
    GpuMemory,
    HeadTimeoutError,
    Node,
    NodeAgent,
    NodeUsage,
    PlacementError,
    PlacementTimeoutError,
    PortLease,
    PortUnavailableError,
    ProcessUsage,
    RayVirtualCluster,
    ReservationReport,
    ResourceHolder,
    ResourceInsufficientError,
    Slot,
    init_ray,
    lease_ports,
    release_ports,
    select_segment_nodes,
    sort_bundle_indices_by_topology,
    testing,
)
from fairlead_placement.spi import (
    COMMAND_MARK,
    Agent,
    ErrorWithFields,
    Job,
    OneTimeEvent,
    Output,
    Rounds,
    SlotClaim,
    Waiting,
    add_command,
    alive_nodes,
    ask_head,
    attach,
    autoscaler_is_there,
    await_published,
    block_shutdown,
    choose_alive,
    claim_slots,
    collect,
    compare_clocks,
    connection,
    count_bundles,
    drain_deadlines,
    draining_nodes,
    find_agents,
    group_pairs,
    head_deadline,
    never_connect,
    number_slots,
    place_pinned,
    process_is_alive,
    publish,
    read_boards,
    read_holders,
    read_newer,
    read_nodes,
    refuse_client,
    release_when_dropped,
    remove_placement_groups,
    run_command,
    run_each,
    run_in_thread,
    run_on_agents,
    run_on_nodes,
    usage_on_nodes,
    wait_until,
    withdraw,
)


def reserve() -> None:
    init_ray()
    assert_type(connection(), object | None)
    assert_type(refuse_client(), None)
    assert_type(init_ray(Path("logs"), address="local", num_cpus=4, num_gpus=0), Any)
    with RayVirtualCluster([2, 0, 2], use_gpus=False, name="small") as cluster:
        assert_type(cluster, RayVirtualCluster)
        assert_type(cluster.slots(), tuple[Slot, ...])
        assert_type(cluster.get_placement_groups(), list[PlacementGroup])
        assert_type(cluster.get_master_address_and_port(), tuple[str, int])
        assert_type(cluster.get_available_address_and_port(0, 1), tuple[str, int])
        assert_type(cluster.get_available_addresses_and_ports_batch([(0, 1)]), list[tuple[str, int]])
        assert_type(cluster.get_resource_usage(), tuple[NodeUsage, ...])
        assert_type(cluster.replace_lost_nodes(timeout_s=60), tuple[Slot, ...])
        assert_type(cluster.extend([2, 1], timeout_s=60, wait_for_nodes_s=5.5), tuple[int, ...])
        assert_type(cluster.release_nodes({4, 5}), None)
        assert_type(cluster.split([1, 3]), tuple[RayVirtualCluster, ...])
        assert_type(cluster.select(node_idx=[0, 2]).select(node_idx=0), RayVirtualCluster)
    assert_type(cluster.reserve(unified=True), RayVirtualCluster)
    assert_type(cluster.shutdown(), bool)


def adopt(groups: list[PlacementGroup]) -> None:
    assert_type(RayVirtualCluster.of(groups), RayVirtualCluster)
    assert_type(RayVirtualCluster.of(groups, 2, name="theirs", timeout_s=5), RayVirtualCluster)


def configure(config: ClusterConfig) -> None:
    cluster = RayVirtualCluster.from_config(config, use_gpus=False)
    assert_type(cluster, RayVirtualCluster)
    assert_type(RayVirtualCluster.from_config({"gpus_per_node": 8, "num_nodes": 2}), RayVirtualCluster)
    assert_type(config["gpus_per_node"], int)
    assert_type(config["num_nodes"], int)
    RayVirtualCluster.from_config(
        {
            "gpus_per_node": 8,
            "num_nodes": 2,
            "master_port_range_low": 2000,
            "master_port_range_high": 3000,
            "segment_size": None,
        }
    )
    if "master_port_range_low" in config and "master_port_range_high" in config and "segment_size" in config:
        assert_type(config["master_port_range_low"], int | None)
        assert_type(config["master_port_range_high"], int | None)
        assert_type(config["segment_size"], int | None)
    assert_type(cluster.placement_group_strategy, Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
    assert_type(cluster.port_range_low, int)
    assert_type(cluster.port_range_high, int)
    assert_type(cluster.segment_size, int | None)
    assert_type(cluster.node_resource_constraints, Sequence[Mapping[str, float]] | None)
    RayVirtualCluster([8], gpu_ids=[0, 2], placement_group_strategy="PACK", communication_backend="gloo")
    RayVirtualCluster([2, 2], gpu_ids=[[0, 1], [2, 3]], port_range_low=2000, port_range_high=3000)
    RayVirtualCluster([2], segment_size=1, node_resource_constraints=[{"memory": 1e9}], label_selector={"kind": "big"})
    RayVirtualCluster([2], gpu_ids="auto", enable_colocation=True, reserve_timeout_s=10, wait_for_nodes_s=1.5)
    assert_type(cluster.name, str)
    assert_type(cluster.use_gpus, bool)
    assert_type(cluster.num_gpus_per_node, int)
    assert_type(cluster.max_colocated_worker_groups, int)
    assert_type(cluster.port_range, tuple[int, int])
    assert_type(cluster.communication_backend, Literal["nccl", "gloo"])
    assert_type(cluster.world_size(), int)
    assert_type(cluster.node_count(), int)
    assert_type(cluster.grid([], title="Mine"), RenderableType)
    assert_type(cluster.print_cluster_grid(), None)
    assert_type(cluster.print_all_worker_groups([]), None)
    assert_type(cluster.groups(), tuple[Any, ...])


def explain(cluster: RayVirtualCluster) -> None:
    report = cluster.explain(unified=True)
    assert_type(report, ReservationReport)
    assert_type(report.verdict, Literal["fits", "taken", "impossible", "reserved"])
    assert_type(report.plan, Mapping[int, tuple[str, ...]])
    assert_type(report.reserved_at, float | None)
    assert_type(report.lost, tuple[str, ...])
    assert_type(report.nodes, tuple[Node, ...])
    assert_type(report.holders, tuple[ResourceHolder, ...])
    for ask in report.asks:
        assert_type(ask.node_idx, int)
        assert_type(ask.count, int)
        assert_type(ask.bundle, Mapping[str, float])
        assert_type(ask.strategy, Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
        assert_type(ask.labels, Mapping[str, str])


def look() -> None:
    assert_type(alive_nodes(), frozenset[str])
    assert_type(alive_nodes(timeout_s=1.0), frozenset[str])
    assert_type(choose_alive(["node"], timeout_s=1.0), list[str])
    assert_type(count_bundles({"CPU": 1.0}, {"CPU": 4.0}), int)
    with head_deadline(1.0):
        assert_type(ask_head("count the nodes", len, "ab", timeout_s=1.0, undo=print), int)
    assert_type(draining_nodes(), frozenset[str])
    assert_type(drain_deadlines(), dict[str, float])
    assert_type(autoscaler_is_there(), bool)
    for node in read_nodes():
        assert_type(node, Node)
        assert_type(node.node_id, str)
        assert_type(node.ip, str)
        assert_type(node.total, Mapping[str, float])
        assert_type(node.free, Mapping[str, float])
        assert_type(node.labels, Mapping[str, str])
    for holder in read_holders():
        assert_type(holder, ResourceHolder)
        assert_type(holder.kind, Literal["placement group", "actor"])
        assert_type(holder.name, str)
        assert_type(holder.holder_id, str)
        assert_type(holder.job_id, str)
        assert_type(holder.bundles, Mapping[str, tuple[Mapping[str, float], ...]])


def slot(group: PlacementGroup) -> None:
    slot = Slot(
        placement_group=group, bundle_index=0, node_idx=0, node_id="", node_ip="", node_rank=0, local_rank=0, capacity=2
    )
    assert_type(slot.placement_group, PlacementGroup)
    assert_type(slot.bundle_index, int)
    assert_type(slot.node_idx, int)
    assert_type(slot.node_id, str)
    assert_type(slot.node_ip, str)
    assert_type(slot.node_rank, int)
    assert_type(slot.local_rank, int)
    assert_type(slot.accelerators, Mapping[str, tuple[str, ...]])
    assert_type(slot.accelerator_ids, tuple[str, ...])
    assert_type(slot.labels, Mapping[str, str])
    assert_type(slot.worker_resources, Mapping[str, float])
    assert_type(slot.capacity, int)
    assert_type(slot.key, tuple[str, int])
    assert_type(slot.env, Mapping[str, str])


def hold(slots: Sequence[Slot], groups: Sequence[PlacementGroup]) -> None:
    claim = claim_slots(slots, "mine", group=object())
    assert_type(claim, SlotClaim)
    assert_type(claim.holder, str)
    assert_type(claim.release(), None)
    assert_type(lease_ports(slots, count=2, low=1400, high=1500), tuple[tuple[PortLease, ...], ...])
    for (lease,) in lease_ports(slots):
        with lease as held:
            assert_type(held, PortLease)
            assert_type(held.host_port, str)
            assert_type(held.address, str)
            assert_type(held.port, int)
            assert_type(held.node_id, str)
            assert_type(held.lease_id, str)
        assert_type(lease.release(), None)
    assert_type(release_ports([lease for (lease,) in lease_ports(slots)], timeout_s=5), None)
    wanted = {"mine": [(slots[0].node_id, {"CPU": 1.0})]}
    assert_type(number_slots([]), tuple[Slot, ...])
    assert_type(place_pinned(wanted), tuple[PlacementGroup, ...] | None)
    assert_type(remove_placement_groups(groups, timeout_s=5), bool)


def add(one: int, other: int) -> int:
    return one + other


def ask_nodes(agent: NodeAgent) -> None:
    assert_type(NodeAgent("0" * 56, timeout_s=5).node_id, str)
    assert_type(agent.timeout_s, float)
    assert_type(agent.lease(2, 1400, 1999), tuple[list[tuple[int, str]], int, int])
    assert_type(agent.release(["id"]), None)
    assert_type(agent.leased(), list[int])
    assert_type(agent.requests(), dict[str, int])
    assert_type(agent.unwatch("mine"), None)
    # What the function returns is what they return.
    assert_type(agent.run(add, 1, 2, timeout_s=1), int)
    assert_type(agent.run(os.getpid), int)
    assert_type(run_on_nodes(add, {"node": (1, 2)}, timeout_s=5), dict[str, int | Exception])
    for found in usage_on_nodes({"node": [os.getpid()]}).values():
        if not isinstance(found, Exception):
            assert_type(found, list[ProcessUsage])
    (process,) = agent.usage([os.getpid()])
    assert_type(process.pid, int)
    assert_type(process.cpu_percent, float)
    assert_type(process.rss_bytes, int)
    assert_type(process.num_threads, int)
    assert_type(process.gpu_memory_bytes, int | None)


def memory(agent: NodeAgent) -> None:
    usage = agent.memory("mine")
    assert_type(usage, NodeUsage)
    assert_type(usage.node_id, str)
    assert_type(usage.memory_total_bytes, int)
    assert_type(usage.memory_used_bytes, int)
    assert_type(usage.memory_available_bytes, int)
    assert_type(usage.memory_peak_bytes, int)
    assert_type(usage.gpu_memory, tuple[GpuMemory, ...] | None)
    assert_type(usage.samples, int)
    assert_type(usage.sampled_at, float)
    for gpu in usage.gpu_memory or ():
        assert_type(gpu.total_bytes, int)
        assert_type(gpu.used_bytes, int)
        assert_type(gpu.peak_bytes, int)


def order() -> None:
    topology: dict[str, tuple[str | None, float | None]] = {"a": ("x", 0), "b": (None, None)}
    assert_type(select_segment_nodes(topology, segment_size=1, num_nodes=1), tuple[list[str], list[str]])
    assert_type(sort_bundle_indices_by_topology([(0, "x", 0, "a"), ("1", None, None, "b")]), list[int])


def wait() -> None:
    with Waiting("reserving") as waiting:
        assert_type(waiting, Waiting)
        assert_type(waiting.show("a node", limit_s=60), None)
    assert_type(release_when_dropped(slot, lambda: "held", lambda: None), None)
    rounds = Rounds(0.5, lambda: None, lambda: False, first_s=0.0, exit_s=5)
    assert_type(rounds.start(), None)
    assert_type(rounds.note(), None)
    assert_type((rounds.close(1.0), rounds.closed, rounds.is_here()), tuple[bool, bool, bool])
    assert_type(never_connect(), None)
    with block_shutdown():
        pass
    assert_type(collect({"a": object}, 1.0), dict[str, tuple[Any, Exception | None]])
    with testing.assert_no_leaks(timeout_s=5):
        pass


def errors(cluster: RayVirtualCluster) -> None:
    try:
        cluster.reserve()
    except HeadTimeoutError as error:
        assert_type(error.reason, str)
        timeout: PlacementTimeoutError = error
        raise timeout from None
    except PlacementTimeoutError as error:
        late: TimeoutError = error
        assert_type(error.report, ReservationReport | None)
        raise late from None
    except ResourceInsufficientError as error:
        assert_type(error.reason, str)
        assert_type(error.report, ReservationReport | None)
    except PortUnavailableError as error:
        assert_type(error.node_ip, str)
        for number in (error.count, error.low, error.high, error.leased, error.in_use):
            assert_type(number, int)
        base: PlacementError = error
        with_fields: ErrorWithFields = base
        assert_type(with_fields.args, tuple[Any, ...])
        raise base from None


def wrong(cluster: RayVirtualCluster, agent: NodeAgent, slot: Slot, slots: Sequence[Slot]) -> None:
    RayVirtualCluster(8)  # type: ignore[arg-type]
    RayVirtualCluster([8], placement_group_strategy="TIGHT")  # type: ignore[arg-type]
    RayVirtualCluster([8], communication_backend="mpi")  # type: ignore[arg-type]
    RayVirtualCluster([8], True, 1, 8, "", "PACK", None, None, None, None, True)  # type: ignore[call-arg]
    RayVirtualCluster.from_config({"num_nodes": 2})  # type: ignore[typeddict-item]
    cluster.select(0)  # type: ignore[call-arg]
    cluster.split(2)  # type: ignore[arg-type]
    cluster.extend(2)  # type: ignore[arg-type]
    cluster.extend([2], 60)  # type: ignore[call-arg]
    cluster.release_nodes(2)  # type: ignore[arg-type]
    lease_ports(slot)  # type: ignore[arg-type]
    lease_ports(slots, 2)  # type: ignore[call-arg]
    claim_slots(slots)  # type: ignore[call-arg]
    agent.run("getpid")  # type: ignore[arg-type]
    run_on_nodes(add, [(1, 2)])  # type: ignore[arg-type]
    Slot(slot.placement_group, 0, 0, "", "", 0, 0)  # type: ignore[call-arg]
    slot.node_idx = 1  # type: ignore[misc]


def look_from_outside() -> None:
    publish("key", 1, {"node": {"plain": "data"}})
    publish("key", 2, {"node": None}, on_loss=lambda node_ids: assert_type(node_ids, Sequence[str]))
    assert_type(await_published("key", "node", timeout_s=5.0), bool)
    withdraw("key", ["node"])
    agents = find_agents()
    assert_type(agents, list[Agent])
    assert_type((agents[0].job_id, agents[0].node_id), tuple[str, str])
    assert_type(agents[0].handle, Any)
    assert_type(read_boards(agents, timeout_s=5.0), dict[Agent, dict[str, Any] | Exception])
    assert_type(read_newer(agents[0], "key", 1, timeout_s=5.0), tuple[int, Any] | Exception)
    assert_type(run_on_agents(len, {agents[0]: ("abc",)}, timeout_s=5.0), dict[Agent, int | Exception])
    assert_type(process_is_alive("worker"), bool | None)
    assert_type(compare_clocks(lambda: 1.0, lambda: 2.0), tuple[float, float] | None)
    assert_type(group_pairs((agent.node_id, agent) for agent in agents), dict[str, list[Agent]])
    job = run_in_thread(len, "abc")
    assert_type(job, Job[int])
    assert_type((job.began, job.future, job.over), tuple[float, Future[int], OneTimeEvent])
    assert_type(job.result(1.0), int)
    assert_type(run_each(len, ["abc"], 4), list[Future[int]])
    assert_type(wait_until(agents.copy, 5.0, longest_s=1.0), bool)
    event = OneTimeEvent()
    event.set()
    assert_type((event.is_set(), event.wait(1.0)), tuple[bool, bool])


def show() -> int:
    output = Output()
    with attach("auto"):
        output.print("text")
        output.print_json({"schema": 1})
        output.make_console()
        output.flush()
    return 0


def run_program() -> None:
    commands = ArgumentParser().add_subparsers()
    assert_type(COMMAND_MARK, str)
    assert_type(add_command(commands, "show", "show something", epilog="", json=False), ArgumentParser)
    assert_type(run_command(show, LookupError), int)
