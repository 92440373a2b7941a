# SPDX-License-Identifier: Apache-2.0
"""Which slices are whole: generated sets of hosts, and every kind of broken slice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_placement import Node
from fairlead_tpu_executor import CpuAcceleratorConfig, GpuAcceleratorConfig, SliceInfo, TpuAcceleratorConfig
from fairlead_tpu_executor._slices import find_type

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
TOPOLOGY = "ray.io/tpu-topology"
TYPE = "ray.io/tpu-pod-type"
V4_32 = TpuAcceleratorConfig("v4-32")


def host(name, worker, *, kind="v4-32", topology="2x2x4", tpus=4.0, **more):
    resources = {"CPU": 8.0, "TPU": tpus, name: 1.0, **({f"TPU-{kind}-head": 1.0} if worker == 0 else {})}
    labels = {SLICE_NAME: name, WORKER_ID: str(worker), TOPOLOGY: topology, TYPE: kind, **more}
    return Node(f"{name}-{worker}-{kind}".ljust(16, "0"), f"10.0.0.{worker}", resources, resources, labels)


def without(node, *labels):
    return replace(node, labels={name: value for name, value in node.labels.items() if name not in labels})


def whole(name="a", hosts=4, **options):
    return [host(name, worker, **options) for worker in range(hosts)]


def intact(nodes, wanted=V4_32):
    """Return the slices that are whole."""
    return [place for place in wanted.find(nodes).values() if isinstance(place, SliceInfo)]


def said(nodes, wanted=V4_32):
    """Return why each slice cannot be used, and check that none can."""
    assert intact(nodes, wanted) == []
    return wanted.find(nodes)


@given(st.permutations(whole("slice-2") + whole("slice-1") + whole("other", 2, kind="v4-16", topology="2x2x2")))
def test_order(nodes):
    """Slices are in the order of their names, and hosts in that of their worker ids, however they joined."""
    first, second = intact(nodes)
    assert [*V4_32.find(nodes)] == [first.slice_name, second.slice_name] == ["slice-1", "slice-2"]
    assert [node_id[:9] for node_id in first.node_ids] == [f"slice-1-{worker}" for worker in range(4)]
    assert (first.num_hosts, first.ip_address, first.topology) == (4, "10.0.0.0", "2x2x4")
    assert (first.num_accelerators_per_host, first.head_resource) == (4, "TPU-v4-32-head")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=14))
def test_only_whole_ones(members):
    """A slice is whole exactly if its worker ids are 0, 1, 2, 3, each once; each other slice is reported once."""
    nodes = [replace(host(name, worker), node_id=f"{at:08}") for at, (name, worker) in enumerate(members)]
    expected = {n for n in "abc" if sorted(worker for name, worker in members if name == n) == [0, 1, 2, 3]}
    assert {place.slice_name for place in intact(nodes)} == expected
    assert V4_32.find(nodes).keys() == {name for name, _ in members}


def test_a_host_is_missing():
    """The message names the missing workers, also worker 0."""
    assert said(whole()[1:]) == {"a": "3 of 4 hosts, worker 0 is missing"}
    assert said(whole()[:2]) == {"a": "2 of 4 hosts, worker 2, 3 is missing"}


def test_hosts_that_disagree():
    """Hosts of different types or topologies do not form a slice of either type."""
    mixed = [*whole()[:3], host("a", 3, kind="v4-16")]
    assert said(mixed) == {"a": "its hosts have different labels: v4-16, v4-32"}
    assert said(mixed, TpuAcceleratorConfig("v4-16")) == {"a": "its hosts have different labels: v4-16, v4-32"}
    assert said([*whole()[:3], host("a", 3, topology="4x4x1")]) == {
        "a": "its hosts have different labels: 2x2x4, 4x4x1"
    }


def test_wrong_worker_ids():
    """A slice with a duplicate id, an id that is too large, or no id is not used."""
    said_ids = "its hosts have the worker ids {}, not 0 to 3"
    assert said([*whole(), host("a", 1, tpus=4.0)])["a"] == said_ids.format("0, 1, 1, 2, 3")
    assert said([*whole()[:3], host("a", 9)])["a"] == said_ids.format("0, 1, 2, 9")
    assert said([*whole()[:3], without(host("a", 3), WORKER_ID)])["a"] == said_ids.format("0, 1, 2, ?")
    nameless = f"hosts without the label {SLICE_NAME}"
    assert said([without(one, SLICE_NAME) for one in whole()]) == {
        nameless: "no label tells which of them form a slice"
    }


def test_chips():
    """A slice whose hosts have another number of chips than the type is not used; the message says which number."""
    assert said(whole(tpus=8.0, kind="v6e-16", topology="4x4"), TpuAcceleratorConfig("v6e-16")) == {
        "a": "its hosts have 8 TPU, v6e-16 has 4 on each (chips_per_vm)"
    }
    assert "chips_per_vm" in said([host("a", 0, kind="v6e-8", topology="2x4")], TpuAcceleratorConfig("v6e-8"))["a"]
    two = [host("a", worker, kind="v6e-8", topology="2x4") for worker in range(2)]
    assert len(intact(two, TpuAcceleratorConfig("v6e-8", chips_per_vm=4))) == 1


def test_two_resources_per_chip():
    """Where Ray counts both cores of a chip, the pool holds that number."""
    found = intact(whole(hosts=2, kind="tpu7x-16", topology="2x2x2", tpus=8.0), TpuAcceleratorConfig("v7x-16"))
    assert [place.num_accelerators_per_host for place in found] == [8]


def test_topology():
    """A slice must have the requested topology."""
    assert "not 2x2x4" in said(whole(topology="4x4x1"), TpuAcceleratorConfig("v4-32", topology="2x2x4"))["a"]
    assert len(intact(whole(), TpuAcceleratorConfig("v4-32", topology="2x2x4"))) == 1


def test_single_hosts():
    """Every single host is a slice, even if hosts share a name or have none."""
    single = TpuAcceleratorConfig("v4-8")
    nodes = [replace(host("pool", 0, kind="v4-8", topology="2x2x1"), node_id=f"{at}" * 16) for at in range(2)]
    nodes += [replace(without(host("x", 0, kind="v4-8", topology="2x2x1"), SLICE_NAME, WORKER_ID), node_id="9" * 16)]
    nodes += [host("alone", 0, kind="v4-8", topology="2x2x1")]
    names = ["99999999", "alone", "pool/00000000", "pool/11111111"]
    assert [place.slice_name for place in intact(nodes, single)] == names
    assert [*single.find(nodes)] == names


def test_type_of_a_generation():
    """A generation stands for the only type of its slices; otherwise the error lists the types of the cluster."""
    nodes = [*whole(), *whole("b", 2, kind="v5e-16", topology="4x4"), without(host("c", 0), TYPE)]
    assert [find_type(nodes, name) for name in ("v4", "TPU-V4", "v5litepod")] == ["v4-32", "v4-32", "v5litepod-16"]
    with pytest.raises(ValueError, match=r"'v4' is a generation .* The cluster has v4-16, v4-32, v5litepod-16"):
        find_type([*nodes, host("d", 0, kind="v4-16")], "v4")
    with pytest.raises(ValueError, match="The cluster has v4-32, v5litepod-16"):
        find_type(nodes, "v5p")
    with pytest.raises(ValueError, match="The cluster has no slices"):
        find_type([], "v4")


@pytest.mark.parametrize(("count", "places"), [(1, "a"), (3, "aab"), (4, "aabb")])
def test_workers_without_tpus(count, places):
    """Without TPUs the workers fill the nodes in order, as far as these have room."""
    nodes = [Node(name, name, {"CPU": 8.0}, {"CPU": 4.5, "GPU": 2.0}, {}) for name in "ab"]
    found = GpuAcceleratorConfig(1, cpu_count=2, worker_count=count).find(nodes)["gpu"]
    assert "".join(found.node_ids) == places


def test_no_room_for_workers():
    """The message gives the missing room in numbers."""
    nodes = [Node("a", "a", {"CPU": 8.0}, {"CPU": 4.0}, {})]
    assert CpuAcceleratorConfig(3, worker_count=2).find(nodes) == {"cpu": "room for 1 of 2 workers of 3 CPU each"}


def test_busy_hosts():
    """A slice is free if all its hosts have room for their bundles; otherwise the message names the busy ones."""
    first, *others = whole()
    busy = replace(first, free={**first.free, "TPU": 3.0})
    assert said([busy, *others]) == {"a": "somebody else uses worker 0"}
    assert said([replace(first, free={**first.free, "TPU-v4-32-head": 0.0}), *others]) == {
        "a": "somebody else uses worker 0"
    }
