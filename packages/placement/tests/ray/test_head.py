# SPDX-License-Identifier: Apache-2.0
"""A Ray head (GCS) that does not answer: errors in time, and nothing left behind once it answers again."""

import contextlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from ray.util.placement_group import placement_group_table

from fairlead_placement import HeadTimeoutError, PlacementTimeoutError, RayVirtualCluster
from fairlead_placement._nodes import head as _head
from fairlead_placement._reserve import attempt as _attempt
from fairlead_placement._reserve import lifecycle as _lifecycle
from fairlead_placement.spi import alive_nodes, head_deadline, place_pinned, read_holders, read_nodes
from fairlead_placement.testing import assert_no_leaks

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def stop_head(stop_process):
    """Stop the head during a `with` statement, in which requests get at least half a second."""
    process = ray._private.worker._global_node.all_processes["gcs_server"][0].process

    @contextlib.contextmanager
    def stop():
        with pytest.MonkeyPatch.context() as patch, stop_process(process.pid) as resume:
            patch.setattr(_head, "LEAST_S", 0.5)
            yield resume

    with assert_no_leaks(timeout_s=60):
        yield stop


def test_one_request(stop_head):
    """The error says what was requested, how long this process waited, and what to do."""
    with stop_head():
        began = time.monotonic()
        with pytest.raises(HeadTimeoutError) as caught:
            alive_nodes(timeout_s=0.7)
        assert time.monotonic() - began >= 0.7
    message = str(caught.value)
    beginning = r"Ray's head \(GCS\) did not answer a request to list the nodes; waited \d+\.\d s\. "
    assert re.match(beginning, message)
    assert "gcs_server" in message
    assert "try again" in message
    assert isinstance(caught.value, PlacementTimeoutError)
    assert alive_nodes(timeout_s=60) == {ray.nodes()[0]["NodeID"]}


@pytest.mark.parametrize("read", [read_nodes, read_holders, alive_nodes])
def test_a_deadline_for_a_block(stop_head, read):
    """All requests of a block end by its deadline. Without a deadline, a request waits until the head answers."""
    with stop_head() as resume:
        with pytest.raises(HeadTimeoutError), head_deadline(0.5):
            read()
        with ThreadPoolExecutor() as pool:
            late = pool.submit(read)
            with pytest.raises(TimeoutError):
                late.result(1)
            resume()
            assert late.result(60) is not None


@pytest.mark.parametrize("options", [{"use_gpus": False}, {"gpu_ids": [0]}], ids=["any", "gpu_ids"])
def test_reserving(stop_head, patient, monkeypatch, options):
    """A reservation fails after its own time, and succeeds once the head answers."""
    cluster = RayVirtualCluster([1], reserve_timeout_s=1.0, **options)
    with stop_head():
        began = time.monotonic()
        with pytest.raises(HeadTimeoutError):
            cluster.reserve()
        assert time.monotonic() - began >= 1
    monkeypatch.setattr(_head, "LEAST_S", 60.0)
    with cluster:
        assert len(cluster.slots()) == 1


def test_the_head_hangs_while_a_reservation_waits(stop_head, monkeypatch):
    """A waiting reservation also fails in time if the head hangs during the wait."""
    with RayVirtualCluster([1], use_gpus=False), contextlib.ExitStack() as stopped:
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: stopped.enter_context(stop_head()))
        monkeypatch.setattr(_attempt, "time", clock)
        with pytest.raises(HeadTimeoutError):
            RayVirtualCluster([16], use_gpus=False, reserve_timeout_s=1.0).reserve()


def test_groups_that_are_created_too_late(stop_head, eventually):
    """A placement group that Ray creates after its reservation has failed is removed."""
    node_id = ray.nodes()[0]["NodeID"]
    message = "a request to create a placement group"
    with stop_head(), pytest.raises(HeadTimeoutError, match=message), head_deadline(0.5):
        place_pinned({"late": [(node_id, {"CPU": 1.0})]})
    assert eventually(lambda: all(row["state"] == "REMOVED" for row in placement_group_table().values()))


def test_using_and_shutting_down(stop_head, monkeypatch, eventually):
    """Reading a cluster's state and shutting it down fail in time; the groups are removed later."""
    cluster = RayVirtualCluster([2], use_gpus=False).reserve()
    cluster.get_master_address_and_port()
    with stop_head(), monkeypatch.context() as patch:
        patch.setattr(_head, "ALIVE_S", 0.5)
        patch.setattr(_head, "HEAD_S", 0.5)
        patch.setattr(_lifecycle, "GIVE_BACK_S", 1.0)
        for use in (cluster.explain, cluster.get_resource_usage, lambda: cluster.replace_lost_nodes(0.5)):
            with pytest.raises(HeadTimeoutError):
                use()
        with pytest.raises(HeadTimeoutError):
            cluster.shutdown()
    assert cluster.shutdown()
    assert eventually(lambda: ray.available_resources().get("CPU") == 16, 30)
