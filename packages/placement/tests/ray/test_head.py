# SPDX-License-Identifier: Apache-2.0
"""A Ray head (GCS) that does not answer: errors in time, and nothing left behind once it answers again."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement import HeadTimeoutError, PlacementTimeoutError, RayVirtualCluster
from fairlead_placement._nodes import head as _head
from fairlead_placement._reserve import lifecycle as _lifecycle
from fairlead_placement.spi import alive_nodes, head_deadline, place_pinned, read_holders, read_nodes
from fairlead_placement.testing import assert_no_leaks

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def stop_head(monkeypatch, stop_process):
    """Stop the head during a `with` statement. Requests get at least half a second."""
    monkeypatch.setattr(_head, "LEAST_S", 0.5)
    process = ray._private.worker._global_node.all_processes["gcs_server"][0].process
    with assert_no_leaks(timeout_s=30):
        yield functools.partial(stop_process, process.pid)


def test_one_request(stop_head):
    """The error says what was requested, how long this process waited, and what to do."""
    with stop_head():
        began = time.monotonic()
        with pytest.raises(HeadTimeoutError) as caught:
            alive_nodes(timeout_s=0.7)
        assert 0.7 <= time.monotonic() - began < 3
    message = str(caught.value)
    assert message.startswith("Ray's head (GCS) did not answer a request to list the nodes; waited 0.7 s. ")
    assert "gcs_server" in message
    assert "try again" in message
    assert isinstance(caught.value, PlacementTimeoutError)
    assert alive_nodes(timeout_s=20) == {ray.nodes()[0]["NodeID"]}


@pytest.mark.parametrize("read", [read_nodes, read_holders, alive_nodes])
def test_a_deadline_for_a_block(stop_head, read):
    """All requests of a block end by its deadline. Without a deadline, a request waits until the head answers."""
    with stop_head() as resume:
        with pytest.raises(HeadTimeoutError), head_deadline(0.5):
            read()
        with ThreadPoolExecutor() as pool:
            late = pool.submit(read)
            time.sleep(1)
            assert not late.done()
            resume()
            assert late.result(20) is not None


@pytest.mark.parametrize("options", [{"use_gpus": False}, {"gpu_ids": [0]}], ids=["any", "gpu_ids"])
def test_reserving(stop_head, options):
    """A reservation fails within its own time, and succeeds once the head answers."""
    cluster = RayVirtualCluster([1], reserve_timeout_s=2.0, **options)
    with stop_head():
        began = time.monotonic()
        with pytest.raises(HeadTimeoutError):
            cluster.reserve()
        assert 1.5 < time.monotonic() - began < 5
    with cluster:
        assert len(cluster.slots()) == 1


def test_the_head_hangs_while_a_reservation_waits(stop_head):
    """A waiting reservation also fails in time if the head hangs during the wait."""
    outcome = []

    def reserve():
        try:
            RayVirtualCluster([16], use_gpus=False, reserve_timeout_s=3.0).reserve()
        except PlacementTimeoutError as error:
            outcome.append((type(error), time.monotonic()))

    with RayVirtualCluster([1], use_gpus=False):
        began = time.monotonic()
        waiter = threading.Thread(target=reserve)
        waiter.start()
        time.sleep(1)
        with stop_head():
            waiter.join(20)
        ((kind, ended),) = outcome
        assert kind is HeadTimeoutError
        assert ended - began < 6


def test_groups_that_are_created_too_late(stop_head, eventually):
    """A placement group that Ray creates after its reservation has failed is removed."""
    node_id = ray.nodes()[0]["NodeID"]
    message = "a request to create a placement group"
    with stop_head(), pytest.raises(HeadTimeoutError, match=message), head_deadline(0.5):
        place_pinned({"late": [(node_id, {"CPU": 1.0})]})
    assert eventually(lambda: all(row["state"] == "REMOVED" for row in placement_group_table().values()))


def test_using_and_shutting_down(stop_head, monkeypatch, eventually):
    """Reading a cluster's state and shutting it down fail in time; the groups are removed later."""
    monkeypatch.setattr("fairlead_placement._nodes.head.ALIVE_S", 0.5)
    monkeypatch.setattr(_head, "HEAD_S", 0.5)
    monkeypatch.setattr(_lifecycle, "GIVE_BACK_S", 1.0)
    cluster = RayVirtualCluster([2], use_gpus=False).reserve()
    cluster.get_master_address_and_port()
    with stop_head():
        for use in (cluster.explain, cluster.get_resource_usage, lambda: cluster.replace_lost_nodes(0.5)):
            with pytest.raises(HeadTimeoutError):
                use()
        began = time.monotonic()
        with pytest.raises(HeadTimeoutError):
            cluster.shutdown()
        assert time.monotonic() - began < 6
    assert cluster.shutdown()
    assert eventually(lambda: ray.available_resources().get("CPU") == 16, 30)
