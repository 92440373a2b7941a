# SPDX-License-Identifier: Apache-2.0
"""Clusters that get more logical nodes, and release some, while they are reserved."""

import contextlib
import threading
import time

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import (
    NodeAgent,
    PlacementError,
    PlacementTimeoutError,
    RayVirtualCluster,
    ResourceInsufficientError,
)
from fairlead_placement._show import as_text
from fairlead_placement.spi import claim_slots
from fairlead_placement.testing import assert_no_leaks


@contextlib.contextmanager
def hold_cpus(count):
    """Hold CPUs, as another user of the cluster does."""
    group = placement_group([{"CPU": count}])
    ray.get(group.ready())
    yield
    remove_placement_group(group)


def find_node(slot):
    """Return the node of a worker in a slot."""

    def here():
        return ray.get_runtime_context().get_node_id()

    strategy = PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundle_index)
    return ray.get(ray.remote(num_cpus=1)(here).options(scheduling_strategy=strategy).remote(), timeout=30)


def read_indices(cluster):
    return [slot.node_idx for slot in cluster.slots()]


class Extension:
    """Calls `extend` on a thread of its own, and keeps what it returns or raises."""

    def __init__(self, cluster, *counts, **options):
        self.result = None
        self._thread = threading.Thread(target=self._run, args=(cluster, list(counts), options))
        self._thread.start()

    def _run(self, cluster, counts, options):
        try:
            self.result = cluster.extend(counts, **options)
        except PlacementError as error:
            self.result = error

    def wait(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


@pytest.fixture
def nodes(raylets):
    """Start a head without room, and two nodes of 2 CPUs."""
    quiet = {"quick_deaths": True, "logging_level": "error", "log_to_driver": False}
    with raylets({"num_cpus": 0}, [{"num_cpus": 2}] * 2, **quiet) as made:
        yield made


def test_nodes_that_join(nodes, monkeypatch, eventually):
    """`extend` waits for nodes that join, with demand for an autoscaler if there is one (seam: whether there is)."""
    with RayVirtualCluster([2, 2], use_gpus=False, name="growing") as cluster:
        before = cluster.slots()
        with assert_no_leaks(), pytest.raises(ResourceInsufficientError, match=r"Waited 1\.\d s for nodes"):
            cluster.extend([2], wait_for_nodes_s=1.1)
        extension = Extension(cluster, 2, timeout_s=5, wait_for_nodes_s=60)
        time.sleep(0.5)
        added = nodes.add_node(num_cpus=2)
        assert extension.wait() == (2,)
        assert cluster.slots()[:4] == before
        assert [slot.node_id for slot in cluster.slots()[4:]] == [added.node_id] * 2
        assert [slot.node_rank for slot in cluster.slots()] == [0, 0, 1, 1, 2, 2]

        monkeypatch.setattr("fairlead_placement._reserve.attempt.autoscaler_is_there", lambda: True)
        extension = Extension(cluster, 2, timeout_s=60)
        assert eventually(lambda: [r for r in placement_group_table().values() if r["state"] == "PENDING"])
        nodes.add_node(num_cpus=2)
        assert extension.wait() == (3,)
        assert len([r for r in placement_group_table().values() if r["state"] == "CREATED"]) == 4


def test_a_lost_node_after_an_extension(nodes, eventually):
    """New slots are replaced as any others, in their places; ports and samples of a released node end."""
    nodes.add_node(num_cpus=2)
    with RayVirtualCluster([2, 2], use_gpus=False, monitor_memory=True) as cluster:
        (added,) = cluster.extend([2])
        view = cluster.select(node_idx=added)
        lost = cluster.slots()[4]
        assert {usage.node_id for usage in cluster.get_resource_usage()} == {slot.node_id for slot in cluster.slots()}
        (machine,) = [one for one in nodes.worker_nodes if one.node_id == lost.node_id]
        nodes.remove_node(machine)
        spare = nodes.add_node(num_cpus=2)
        assert eventually(lambda: cluster.replace_lost_nodes(timeout_s=30), 30)
        assert {slot.node_id for slot in view.slots()} == {spare.node_id}
        assert cluster.slots()[4:] == view.slots()

        released = cluster.slots()[0].node_id
        agent = NodeAgent(released)
        cluster.get_master_address_and_port()
        assert (len(agent.leased()), len(agent._ask("watchers")[0])) == (1, 1)
        cluster.release_nodes([0])
        assert (agent.leased(), agent._ask("watchers")[0]) == ([], [])
        assert released not in {usage.node_id for usage in cluster.get_resource_usage()}
        cluster.get_master_address_and_port()


def test_a_node_is_replaced_during_an_extension(nodes, eventually):
    """The slots of a lost node are replaced while an extension waits for a node that joins."""
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        extension = Extension(cluster, 4, wait_for_nodes_s=60)
        (machine,) = [one for one in nodes.worker_nodes if one.node_id == cluster.slots()[0].node_id]
        nodes.remove_node(machine)
        assert eventually(lambda: cluster.replace_lost_nodes(timeout_s=10), 30)
        replaced = cluster.slots()
        assert read_indices(cluster) == [0, 0]
        added = nodes.add_node(num_cpus=4)
        assert extension.wait() == (1,)
        assert cluster.slots()[:2] == replaced
        assert [slot.node_id for slot in cluster.slots()[2:]] == [added.node_id] * 4


def test_unified(nodes):
    """A unified cluster gets a group on further nodes, and releases only whole groups."""
    nodes.add_node(num_cpus=4)
    with RayVirtualCluster([1, 1], use_gpus=False).reserve(unified=True) as cluster:
        assert cluster.extend([1]) == (2,)
        assert len({slot.node_id for slot in cluster.slots()}) == 3
        assert len(cluster.get_placement_groups()) == 2
        with pytest.raises(ResourceInsufficientError, match="each logical node on a physical node of its own"):
            cluster.extend([1])
        with pytest.raises(ValueError, match=r"logical nodes \[0, 1\] are in one placement group: release all of them"):
            cluster.release_nodes([1, 2])
        cluster.release_nodes([2])
        cluster.release_nodes([0, 1])
        assert cluster.slots() == ()


def test_segments(raylets):
    """New logical nodes form segments of their own, each in one domain, and are released as segments."""
    domains = [{"num_cpus": 2, "labels": {"ray.io/gpu-domain": name}} for name in "aabb"]
    with (
        raylets({"num_cpus": 0}, domains, logging_level="error"),
        RayVirtualCluster([2, 2], use_gpus=False, segment_size=2) as cluster,
    ):
        with pytest.raises(ValueError, match="1 logical nodes in use are not a multiple of segment_size=2"):
            cluster.extend([2])
        assert cluster.extend([2, 2]) == (2, 3)
        labels = [slot.labels["ray.io/gpu-domain"] for slot in cluster.slots()]
        assert labels == list("aaaabbbb")
        with pytest.raises(ValueError, match=r"logical nodes \[2, 3\] are in one segment: release all of them or none"):
            cluster.release_nodes([3])
        cluster.release_nodes([0, 1])
        assert [slot.labels["ray.io/gpu-domain"] for slot in cluster.slots()] == list("bbbb")


@pytest.mark.usefixtures("local_ray")
class TestOneNode:
    def test_extend(self):
        """New slots are at the end and usable; the other slots, views and groups do not change."""
        with RayVirtualCluster([2, 0, 1], use_gpus=False) as cluster:
            before, (first, second) = cluster.slots(), cluster.split([2, 1])
            assert cluster.extend([2, 1]) == (3, 4)
            assert cluster.slots()[:3] == before
            assert read_indices(cluster) == [0, 0, 2, 3, 3, 4]
            assert [slot.local_rank for slot in cluster.slots()] == list(range(6))
            assert [find_node(slot) for slot in cluster.slots()[3:]] == [before[0].node_id] * 3
            assert (cluster.world_size(), cluster.node_count()) == (6, 4)
            assert len(cluster.get_placement_groups()) == 4
            assert first.slots() + second.slots() == before
            assert (first.world_size(), second.world_size()) == (2, 1)
            assert cluster.select(node_idx=[0, 4]).slots() == (*before[:2], cluster.slots()[5])
            report = cluster.explain()
            assert report.verdict == "reserved"
            assert list(report.plan) == [0, 2, 3, 4]
            rows = as_text(cluster.grid()).splitlines()
            assert sum("3.1" in row for row in rows) == 1
            assert "5 nodes" not in rows[0]
            assert "4 nodes, 6 CPUs" in rows[0]

    def test_an_unreserved_cluster_is_reserved_first(self):
        """`extend` reserves the cluster, too, and a cluster without any slot can be extended."""
        with RayVirtualCluster([0], use_gpus=False) as cluster:
            assert cluster.slots() == ()
            assert cluster.extend([2]) == (1,)
            assert read_indices(cluster) == [1, 1]

    def test_too_large(self):
        """If the nodes have no room beside the cluster, `extend` is refused at once, and nothing has changed."""
        with RayVirtualCluster([9], use_gpus=False) as cluster:
            before = cluster.slots()
            began = time.monotonic()
            with assert_no_leaks(), pytest.raises(ResourceInsufficientError) as caught:
                cluster.extend([4, 4])
            assert time.monotonic() - began < 10
            assert caught.value.reason.startswith(
                "The cluster cannot hold 8 bundles in 2 logical node(s), even when nothing runs beside what it extends"
            )
            assert caught.value.report.nodes[0].total["CPU"] == 16
            assert (cluster.slots(), cluster.world_size()) == (before, 9)
            assert cluster.extend([7]) == (1,)

    def test_others_hold_it(self):
        """`extend` waits for what others hold until its deadline; the advice names its own argument."""
        with hold_cpus(10), RayVirtualCluster([4], use_gpus=False) as cluster:
            with assert_no_leaks(), pytest.raises(PlacementTimeoutError, match=r"wait longer \(timeout_s\)"):
                cluster.extend([4], timeout_s=0.5)
            assert read_indices(cluster) == [0] * 4

    def test_two_at_once(self):
        """A second extension waits for the first, or fails by its own timeout."""
        with RayVirtualCluster([2], use_gpus=False) as cluster:
            with hold_cpus(12):
                first = Extension(cluster, 4, timeout_s=60)
                time.sleep(0.3)
                with pytest.raises(
                    PlacementTimeoutError, match=r"Waited 0\.2 s: another thread extends .* \(timeout_s\)"
                ):
                    cluster.extend([1], timeout_s=0.2)
                second = Extension(cluster, 2, timeout_s=60)
                assert read_indices(cluster) == [0, 0]
            assert (first.wait(), second.wait()) == ((1,), (2,))
            assert read_indices(cluster) == [0, 0, 1, 1, 1, 1, 2, 2]

    def test_a_release_during_an_extension(self):
        """Nodes are released while an extension waits, which then gets their room."""
        with RayVirtualCluster([2, 10], use_gpus=False) as cluster:
            with pytest.raises(ResourceInsufficientError):
                cluster.extend([8])
            extension = Extension(cluster, 8, wait_for_nodes_s=60)
            time.sleep(0.3)
            cluster.release_nodes([1])
            assert extension.wait() == (2,)
            assert read_indices(cluster) == [0] * 2 + [2] * 8

    def test_a_shutdown_ends_an_extension(self):
        """A shutdown does not wait for an extension, which then fails and leaves nothing."""
        with hold_cpus(12):
            cluster = RayVirtualCluster([2], use_gpus=False).reserve()
            extension = Extension(cluster, 4, timeout_s=60)
            time.sleep(0.3)
            began = time.monotonic()
            cluster.shutdown()
            assert time.monotonic() - began < 10
            assert "was shut down while it was extended" in str(extension.wait())
        assert not [row for row in placement_group_table().values() if row["state"] == "CREATED"]

    def test_release(self):
        """Released slots are gone from the cluster and its views; numbers are not used again."""
        with RayVirtualCluster([1, 2, 1], use_gpus=False) as cluster:
            before = cluster.slots()
            whole, middle = cluster.split([4])[0], cluster.select(node_idx=1)
            with assert_no_leaks():
                cluster.extend([3])
                cluster.release_nodes([3])
            cluster.release_nodes({1})
            assert [slot.placement_group for slot in cluster.slots()] == [before[at].placement_group for at in (0, 3)]
            assert [slot.local_rank for slot in cluster.slots()] == [0, 1]
            assert whole.slots() == cluster.slots()
            assert (whole.world_size(), middle.world_size(), middle.slots()) == (2, 0, ())
            assert (cluster.world_size(), cluster.node_count(), len(cluster.get_placement_groups())) == (2, 2, 2)
            assert "not used" in as_text(cluster.grid())
            assert cluster.extend([2]) == (4,)
            assert read_indices(cluster) == [0, 2, 4, 4]
            with pytest.raises(IndexError, match=r"logical node\(s\) \[1, 7\] are not in use; these are: \[0, 2, 4\]"):
                cluster.release_nodes([0, 1, 7])
            cluster.release_nodes([0, 2, 4])
            assert cluster.slots() == ()
            assert cluster.extend([1]) == (5,)

    def test_a_changed_cluster_is_reserved_again(self):
        """After a shutdown the cluster reserves the logical nodes that it had last."""
        cluster = RayVirtualCluster([1, 1], use_gpus=False)
        cluster.extend([2])
        cluster.release_nodes([0])
        cluster.shutdown()
        with pytest.raises(PlacementError, match="has no nodes to release"):
            cluster.release_nodes([1])
        with cluster:
            assert read_indices(cluster) == [1, 2, 2]

    def test_groups_in_the_slots(self):
        """Logical nodes with a worker group are not released, and no group can claim a released slot."""
        with RayVirtualCluster([1, 1], use_gpus=False, name="shared") as cluster:
            old = cluster.slots()
            claim = claim_slots(old[1:], "policy")
            message = r"Logical node\(s\) \[0, 1\] of 'shared' cannot be released: worker group\(s\) 'policy' use their"
            with pytest.raises(PlacementError, match=message):
                cluster.release_nodes([0, 1])
            assert cluster.slots() == old
            cluster.release_nodes([0])
            claim.release()
            with pytest.raises(ResourceInsufficientError, match="'critic' cannot run in bundle 0 of logical node 0"):
                claim_slots(old, "critic")
            claim_slots(cluster.slots(), "critic").release()

    def test_views_are_refused(self):
        """A view has no nodes of its own to add or release."""
        with RayVirtualCluster([1, 1], use_gpus=False) as cluster:
            view = cluster.select(node_idx=1)
            with pytest.raises(ValueError, match=r"call extend\(\) of the cluster that it was taken from"):
                view.extend([1])
            with pytest.raises(ValueError, match=r"call release_nodes\(\) of the cluster that it was taken from"):
                view.release_nodes([1])

    def test_a_drop_returns_everything(self, eventually, recwarn):
        """A dropped cluster also releases what has been added to it."""
        cluster = RayVirtualCluster([1], use_gpus=False).reserve()
        cluster.extend([1])
        del cluster
        assert eventually(lambda: not [r for r in placement_group_table().values() if r["state"] != "REMOVED"])
