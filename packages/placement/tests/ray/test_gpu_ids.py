# SPDX-License-Identifier: Apache-2.0
"""Reservations of particular GPUs, on one node with 4 pretended GPUs."""

import contextlib
import os
import re
import signal
import threading
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_placement._reserve import gpus


def in_bundle(group, index=0):
    return PlacementGroupSchedulingStrategy(group, index)


def groups_there():
    return [i for i, row in placement_group_table().items() if row["state"] != "REMOVED"]


def read_gpu_ids(cluster):
    """Return the ids that a process in each bundle gets, by logical node."""

    @ray.remote(num_cpus=1, num_gpus=1)
    def ids():
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    slots = cluster.slots()
    asked = [
        ids.options(scheduling_strategy=in_bundle(slot.placement_group, slot.bundle_index)).remote() for slot in slots
    ]
    by_node = {}
    for slot, visible in zip(slots, ray.get(asked), strict=True):
        assert tuple(visible) == slot.accelerator_ids
        by_node.setdefault(slot.node_idx, []).extend(map(int, visible))
    return by_node


class Trainer:
    def gpus(self):
        return [int(one) for one in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def free_gpus():
    return ray.available_resources().get("GPU", 0)


@contextlib.contextmanager
def actor(**options):
    """Hold GPUs with an actor. Until its node reports them, they look free."""
    options = {"num_cpus": 0, "num_gpus": 1, **options}
    left = free_gpus() - (0 if "scheduling_strategy" in options else options["num_gpus"])
    made = ray.remote(Trainer).options(**options).remote()
    try:
        gpus = ray.get(made.gpus.remote())
        while free_gpus() > left:
            time.sleep(0.02)
        yield gpus
    finally:
        ray.kill(made)


@pytest.fixture
def local(local_ray):
    """Start a Ray, and check after each test that no placement group is left."""
    assert groups_there() == []
    yield
    assert groups_there() == []


@pytest.mark.smoke
@pytest.mark.parametrize("ids", [[2], [3, 1], [0, 1, 2, 3]])
def test_the_bundles_have_the_ids(local, ids, eventually):
    """The bundles are on the named GPUs, in ascending order; the other GPUs are free again."""
    with RayVirtualCluster([0, len(ids)], gpu_ids=ids) as cluster:
        assert read_gpu_ids(cluster) == {1: sorted(ids)}
        assert groups_there() == [cluster.get_placement_groups()[0].id.hex()]
        assert eventually(lambda: free_gpus() == 4 - len(ids))


def test_a_list_for_each_logical_node(local):
    """Logical nodes that share a physical node each get their ids; the list of an unused one is empty."""
    with RayVirtualCluster([2, 0, 1], gpu_ids=[[3, 0], [], [2]], max_colocated_worker_groups=2) as cluster:
        assert [slot.accelerator_ids for slot in cluster.slots()] == [("0",), ("2",), ("3",)]
        assert [slot.node_idx for slot in cluster.slots()] == [0, 2, 0]
        assert [slot.worker_resources for slot in cluster.slots()] == [{"CPU": 1.0, "GPU": 0.5}] * 3
    with pytest.raises(ValueError, match="has gpu_ids, so each logical node has a placement group"):
        RayVirtualCluster([0, 2], gpu_ids=[[], [3, 2]]).reserve(unified=True)


def test_two_at_once(local):
    """Two clusters that request different GPUs of one node at the same time both get theirs."""
    clusters = [RayVirtualCluster([2], gpu_ids=ids) for ids in ([1, 2], [0, 3])]
    threads = [threading.Thread(target=cluster.reserve) for cluster in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [read_gpu_ids(cluster) for cluster in clusters] == [{0: [1, 2]}, {0: [0, 3]}]
    for cluster in clusters:
        cluster.shutdown()


@pytest.mark.nightly
def test_held_by_others(local, hold_group):
    """A reservation waits for GPUs until its deadline. The error names those that are missing, and lists holders."""
    with (
        actor(name="first") as (first,),
        hold_group([{"GPU": 1}], name="other[/people]") as group,
        actor(num_gpus=0.5, scheduling_strategy=in_bundle(group)) as (second,),
    ):
        before = groups_there()
        with pytest.raises(ResourceInsufficientError) as caught:
            RayVirtualCluster([4], gpu_ids=[0, 1, 2, 3], reserve_timeout_s=0.5).reserve()
        assert groups_there() == before
        message = caught.value.reason
        assert re.match(r"Waited \d+\.\d s for particular GPUs\. GPU ", message)
        assert "GPU 0, 1, 2, 3, requested for logical node 0, are not all free on node" in message
        assert "Release them, request others (gpu_ids), or wait longer (reserve_timeout_s" in message
        assert caught.value.report.verdict == "taken"
        assert {holder.name for holder in caught.value.report.holders} == {"first", "other[/people]"}
        assert "│ 0            │ 4       │ 1 CPU, 1 GPU │ STRICT_PACK │" in str(caught.value)

        free = sorted({0, 1, 2, 3} - {first, second})
        with RayVirtualCluster([2], gpu_ids=free, reserve_timeout_s=0) as cluster:
            assert read_gpu_ids(cluster) == {0: free}


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        (
            [2],
            [3, 4],
            r"No node has GPU 4, requested for logical node 0: node \w{8} \([\d.]+\) has 0, 1, 2, 3\..* Request",
        ),
        ([1, 1], [[0], [0]], r"cannot hold 2 logical nodes on the requested GPUs, even when it is idle: node"),
    ],
)
def test_no_node_has_them(local, pauses, counts, ids, message):
    """Ids that no node has, or that two logical nodes request on one node, are refused without a wait."""
    with pytest.raises(ResourceInsufficientError, match=message) as caught:
        RayVirtualCluster(counts, gpu_ids=ids).reserve()
    assert (caught.value.report.verdict, caught.value.report.plan) == ("impossible", {})
    assert pauses == []


def test_interrupted(local, monkeypatch):
    """An interrupt while free GPUs are held leaves no placement group (seam: the placing on the named ones)."""

    def interrupt(*args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(gpus, "place", interrupt)
    with pytest.raises(KeyboardInterrupt):
        RayVirtualCluster([1], gpu_ids=[2]).reserve()
    assert groups_there() == []


def test_other_gpus_than_those_named(local, monkeypatch):
    """A group that is on other GPUs, because another request was faster, is removed (seam: the ids of the first)."""
    read, ids = gpus.accelerator_ids, []

    def read_wrong_ids(placed, **options):
        ids.append(read(placed, **options))
        return [[{"GPU": ("9",)}]] if len(ids) == 2 else ids[-1]  # after those of the free GPUs

    monkeypatch.setattr(gpus, "accelerator_ids", read_wrong_ids)
    with RayVirtualCluster([1], gpu_ids=[2]) as cluster:
        assert [slot.accelerator_ids for slot in cluster.slots()] == [("2",)]
        assert len(groups_there()) == 1
    assert len(ids) >= 4


@pytest.mark.nightly
def test_renamed(run_script):
    """On a node whose Ray sees only some GPUs, the ids are those of these GPUs, which may be names."""
    out = run_script(
        """
        import time
        import ray
        from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
        ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="error", num_gpus=3)

        @ray.remote(num_cpus=0, num_gpus=1)
        class Holder:
            def ids(self):
                return ray.get_runtime_context().get_accelerator_ids()["GPU"]

        holder = Holder.remote()
        print(ray.get(holder.ids.remote()))
        while ray.available_resources()["GPU"] > 2:  # the GPU looks free until the node has reported it
            time.sleep(0.02)
        with RayVirtualCluster([1], gpu_ids=["GPU-9a"]) as cluster:
            print([slot.accelerator_ids for slot in cluster.slots()])
        for ids in ([0], ["5"]):
            try:
                RayVirtualCluster([1], gpu_ids=ids, reserve_timeout_s=0).reserve()
            except ResourceInsufficientError as error:
                print(error.reason)
        """,
        CUDA_VISIBLE_DEVICES="5,MIG-7,GPU-9a",
        RAY_ADDRESS="",
    )
    held, got, no_node, taken = out.splitlines()
    assert (held, got) == ("['5']", "[('GPU-9a',)]")
    assert "No node has GPU 0, requested for logical node 0: node" in no_node
    assert "has 5, GPU-9a, MIG-7." in no_node
    assert "GPU 5, requested for logical node 0, is not free on node" in taken
