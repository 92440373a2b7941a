# SPDX-License-Identifier: Apache-2.0
"""Reservations on one node of 16 CPUs and 4 GPUs: slots, waiting, release."""

import gc
import os
import re
import signal
import threading
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import PlacementError, PlacementTimeoutError, RayVirtualCluster, ResourceInsufficientError

pytestmark = pytest.mark.usefixtures("local_ray")


def groups_there():
    return {i: row for i, row in placement_group_table().items() if row["state"] != "REMOVED"}


def in_bundle(slot):
    return PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundle_index)


@pytest.mark.smoke
def test_slots():
    """A slot says where it is and what one worker there requests; its bundle is pinned to its node."""
    (here,) = ray.nodes()
    with RayVirtualCluster([2, 0, 3], use_gpus=False, name="facts") as cluster:
        slots = cluster.slots()
        assert [(s.node_idx, s.bundle_index, s.node_rank, s.local_rank) for s in slots] == [
            (0, 0, 0, 0),
            (0, 1, 0, 1),
            (2, 0, 0, 2),
            (2, 1, 0, 3),
            (2, 2, 0, 4),
        ]
        assert {(s.node_id, s.node_ip) for s in slots} == {(here["NodeID"], here["NodeManagerAddress"])}
        for slot in slots:
            assert slot.worker_resources == {"CPU": 1.0}
            assert (slot.accelerator_ids, slot.capacity, slot.env) == ((), 1, {})
            assert slot.labels["ray.io/node-id"] == here["NodeID"]
        assert repr(cluster).endswith("reserved)")

        groups = cluster.get_placement_groups()
        assert [slot.placement_group for slot in slots] == [groups[0]] * 2 + [groups[1]] * 3
        for group, count in zip(groups, (2, 3), strict=True):
            row = placement_group_table(group)
            assert row["name"].startswith("facts-")
            assert list(row["bundles"].values()) == [{"CPU": 1.0}] * count
            assert set(row["bundles_to_node_id"].values()) == {here["NodeID"]}
    assert groups_there() == {}


@pytest.mark.smoke
def test_accelerator_ids():
    """A slot names the GPUs that a process in its bundle gets; slots are in ascending order of them."""
    first = RayVirtualCluster([1]).reserve()
    with RayVirtualCluster([1]):
        first.shutdown()  # leaves a gap, so the free GPUs are not consecutive
        with RayVirtualCluster([2], max_colocated_worker_groups=2) as cluster:

            @ray.remote(num_cpus=1, num_gpus=0.5)
            def seen():
                return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])

            slots = cluster.slots()
            asked = [seen.options(scheduling_strategy=in_bundle(slot)).remote() for slot in slots]
            assert ray.get(asked) == [slot.accelerator_ids for slot in slots]
            ids = [int(one) for slot in slots for one in slot.accelerator_ids]
            assert ids == sorted(set(ids))
            assert len(ids) == 2


@pytest.mark.parametrize(("groups", "share"), [(3, 0.3333), (7, 0.1428)])
def test_shares(groups, share):
    """All workers that may share a slot start if each requests its share, even if a GPU does not divide evenly."""

    class Worker:
        def gpu(self):
            return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    with RayVirtualCluster([1], max_colocated_worker_groups=groups) as cluster:
        (slot,) = cluster.slots()
        assert slot.worker_resources == {"CPU": 1.0, "GPU": share}
        assert slot.capacity == groups
        options = {
            "num_cpus": slot.worker_resources["CPU"],
            "num_gpus": slot.worker_resources["GPU"],
            "scheduling_strategy": in_bundle(slot),
        }
        workers = [ray.remote(Worker).options(**options).remote() for _ in range(groups)]
        assert ray.get([worker.gpu.remote() for worker in workers], timeout=150) == [slot.accelerator_ids] * groups


@pytest.mark.smoke
def test_unified():
    """A unified cluster is one group with each logical node on its own physical node; one node holds one."""
    with RayVirtualCluster([0, 2], use_gpus=False).reserve(unified=True) as cluster:
        assert [(slot.node_idx, slot.bundle_index) for slot in cluster.slots()] == [(1, 0), (1, 1)]
        assert len(cluster.get_placement_groups()) == 1
    with pytest.raises(ResourceInsufficientError, match="each logical node on a physical node of its own"):
        RayVirtualCluster([2, 2], use_gpus=False).reserve(unified=True)
    with pytest.raises(ResourceInsufficientError, match="cannot hold 2 bundles in 1 logical node"):
        RayVirtualCluster([2], use_gpus=False, placement_group_strategy="STRICT_SPREAD").reserve()


def test_reserving_twice():
    """A second `reserve` changes nothing, and is refused with another `unified`; after shutdown it reserves again."""
    cluster = RayVirtualCluster([2], use_gpus=False, name="twice").reserve()
    (group,) = cluster.get_placement_groups()
    assert cluster.reserve() is cluster
    assert cluster.get_placement_groups() == [group]
    with pytest.raises(PlacementError, match=r"name='twice', reserved\) is reserved with unified=False; shutdown\(\)"):
        cluster.reserve(unified=True)
    cluster.shutdown()
    cluster.reserve(unified=True)
    assert cluster.get_placement_groups() != [group]
    assert cluster.shutdown() is cluster.shutdown() is True


def test_empty():
    """A cluster without a node in use reserves nothing."""
    for unified in (False, True):
        with RayVirtualCluster([0, 0]).reserve(unified=unified) as cluster:
            assert (cluster.world_size(), cluster.slots(), cluster.get_placement_groups()) == (0, (), [])
            with pytest.raises(PlacementError, match="has no slot"):
                cluster.get_master_address_and_port()


def test_never_fits(hold_group, pauses):
    """A request that does not fit an idle node is refused without a wait, with what was requested and found."""
    with hold_group([{"CPU": 3}]), pytest.raises(ResourceInsufficientError) as caught:
        RayVirtualCluster([2, 5, 5, 1]).reserve()
    assert pauses == []
    message = str(caught.value)
    for part in (
        "cannot hold 13 bundles in 4 logical nodes, even when they are idle",
        "A local Ray gets more by init_ray(num_cpus=...)",
        "wait for nodes that are joining (wait_for_nodes_s)",
        "│ 0            │ 2       │ 1 CPU, 1 GPU │ STRICT_PACK │",
        "│ 1 to 2       │ 5 ",
        "16 CPU, 4 GPU │ 13 CPU, 4 GPU │",
    ):
        assert part in message, message
    assert groups_there() == {}


def test_taken(hold_group, pauses):
    """A reservation waits for held resources until its deadline. The error names the holder; nothing is left."""
    with hold_group([{"CPU": 12}, {"CPU": 1}, {"CPU": 1}], name="other[/people]") as group:
        for timeout_s in (0.0, 0.7):
            assert pauses == []
            began = time.monotonic()
            with pytest.raises(PlacementTimeoutError) as caught:
                RayVirtualCluster([4], use_gpus=False, reserve_timeout_s=timeout_s).reserve()
            assert time.monotonic() - began >= timeout_s
            assert list(groups_there()) == [group.id.hex()]
    assert pauses
    message = str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    beginning = r"Waited (\d+\.\d) s: the request would fit on these nodes, but others hold what it needs"
    assert float(re.match(beginning, message)[1]) >= 0.7
    assert "wait longer (reserve_timeout_s, or timeout_s of launch or replace_lost_nodes)" in message
    assert f"placement group other[/people] {group.id.hex()[:8]})" in message
    # The cell is wrapped.
    words = " ".join(message.replace("│", " ").split())
    for part in (group.id.hex()[:8], ray.get_runtime_context().get_job_id(), "1 x 12 CPU", "2 x 1 CPU", "16 CPU"):
        assert part in words


def test_what_ray_cannot_place_is_given_back(hold_group):
    """GPUs may be free in sum but not as wholes: the group that Ray cannot place is removed before the error."""
    with hold_group([{"GPU": 0.6}] * 4) as group:
        with pytest.raises(PlacementTimeoutError, match="others hold what it needs"):
            RayVirtualCluster([1], reserve_timeout_s=0.5).reserve()
        assert list(groups_there()) == [group.id.hex()]


def test_a_waiter_is_served(pauses, eventually, caplog):
    """A waiting reservation says whom it waits for, and gets the resources when that cluster is shut down."""
    first = RayVirtualCluster([16], use_gpus=False, name="first").reserve()
    second = RayVirtualCluster([10], use_gpus=False, name="second")
    waiter = threading.Thread(target=second.reserve)
    waiter.start()
    assert eventually(lambda: "Reserving 10 x 1 CPU for second, for up to 180 s:" in caplog.text, 60)
    assert pauses
    assert waiter.is_alive()
    said = caplog.messages[0]
    assert "others hold what it needs (placement group first-0-" in said
    first.shutdown()
    waiter.join()
    assert len(second.slots()) == 10
    second.shutdown()


@pytest.mark.parametrize("bundles", [[{"CPU": 16}], [{"GPU": 0.6}] * 4], ids=["waiting", "placing"])
def test_interrupted(request, bundles, hold_group, pauses, eventually):
    """An interrupt ends the wait and leaves nothing, also while Ray places a group."""

    def interrupt():
        is_placing = request.node.callspec.id == "placing"
        assert eventually(lambda: len(groups_there()) == 2 if is_placing else pauses, 60)
        os.kill(os.getpid(), signal.SIGINT)

    with hold_group(bundles) as group:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            RayVirtualCluster([1], reserve_timeout_s=600).reserve()
        thread.join()
        assert list(groups_there()) == [group.id.hex()]


@pytest.fixture
def reserving(pauses, hold_group, eventually):
    """Yield a cluster for which another thread waits, and the list of what that thread raises; others hold a CPU."""
    cluster, raised = RayVirtualCluster([16], use_gpus=False, reserve_timeout_s=600, name="waiting"), []

    def reserve():
        try:
            cluster.reserve()
        except PlacementError as error:
            raised.append(error)

    with hold_group([{"CPU": 1}]):
        waiter = threading.Thread(target=reserve)
        waiter.start()
        assert eventually(lambda: pauses, 60)
        yield cluster, raised
        waiter.join(60)


def test_shutdown_ends_a_reservation_of_another_thread(reserving, eventually):
    """`shutdown` does not wait for what others hold: the reservation of the other thread fails and leaves nothing."""
    cluster, raised = reserving
    began = time.monotonic()
    assert cluster.shutdown()
    assert time.monotonic() - began < 30
    assert eventually(lambda: raised, 30)
    assert "The cluster 'waiting' was shut down in the meantime" in str(raised[0])
    assert len(groups_there()) == 1


def test_shutdown_from_a_signal_handler(hold_group, pauses, eventually):
    """In the middle of a reservation of its own thread, `shutdown` makes the reservation fail."""
    cluster = RayVirtualCluster([16], use_gpus=False, reserve_timeout_s=600)

    def interrupt():
        assert eventually(lambda: pauses, 60)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: cluster.shutdown())
    try:
        with hold_group([{"CPU": 1}]):
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(PlacementError, match="was shut down in the meantime"):
                cluster.reserve()
            thread.join()
        with cluster:  # it can be reserved again
            signal.raise_signal(signal.SIGUSR1)  # and is released by a handler outside of a reservation
            assert groups_there() == {}
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_shutdown_returns_the_resources(tmp_path, eventually, pauses):
    """After shutdown Ray has the resources, even if they were held briefly or a worker still ran."""
    for held_s in (0, 0, 0, 0.02, 0.1):
        with RayVirtualCluster([4, 8], use_gpus=False):
            time.sleep(held_s)
        assert ray.available_resources()["CPU"] == 16
    with RayVirtualCluster([16], use_gpus=False) as cluster:

        @ray.remote(num_cpus=1)
        def sleep(at):
            (tmp_path / str(at)).touch()
            time.sleep(600)

        for at, slot in enumerate(cluster.slots()[:2]):
            sleep.options(scheduling_strategy=in_bundle(slot)).remote(at)
        assert eventually(lambda: len(list(tmp_path.iterdir())) == 2, 120)
    assert ray.available_resources()["CPU"] == 16
    RayVirtualCluster([16], use_gpus=False, reserve_timeout_s=0.0).reserve().shutdown()
    assert pauses == []


def test_dropped(eventually, recwarn):
    """A dropped cluster releases its bundles, with a warning that says what to do."""
    RayVirtualCluster([2], use_gpus=False, name="lost").reserve()
    gc.collect()
    assert eventually(lambda: not groups_there())
    messages = [str(one.message) for one in recwarn if one.category is ResourceWarning and "'lost'" in str(one.message)]
    assert messages == [
        (
            "The virtual cluster 'lost' was dropped without shutdown() while it held 1 placement group(s) and 0 "
            "port(s). They are returned in the background. Use the cluster in a with statement, or call shutdown()."
        )
    ]

    cluster = RayVirtualCluster([2], use_gpus=False).reserve()
    cluster.myself = cluster
    del cluster
    assert len(groups_there()) == 1
    gc.collect()
    assert eventually(lambda: not groups_there())
