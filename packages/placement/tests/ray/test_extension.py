# SPDX-License-Identifier: Apache-2.0
"""Clusters that get more logical nodes, and release some, while they are reserved, on one node."""

from random import Random

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import (
    PlacementError,
    PlacementTimeoutError,
    RayVirtualCluster,
    ResourceInsufficientError,
)
from fairlead_placement._show import as_text
from fairlead_placement.extension import claim_slots
from fairlead_placement.testing import assert_no_leaks


def find_node(slot):
    """Return the node of a worker in a slot."""

    def here():
        return ray.get_runtime_context().get_node_id()

    strategy = PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundle_index)
    return ray.get(ray.remote(num_cpus=1)(here).options(scheduling_strategy=strategy).remote(), timeout=120)


def read_indices(cluster):
    return [slot.node_idx for slot in cluster.slots()]


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

    def test_too_large(self, pauses):
        """If the nodes have no room beside the cluster, `extend` is refused without a wait; nothing has changed."""
        with RayVirtualCluster([9], use_gpus=False) as cluster:
            before = cluster.slots()
            with assert_no_leaks(), pytest.raises(ResourceInsufficientError) as caught:
                cluster.extend([4, 4])
            assert pauses == []
            assert caught.value.reason.startswith(
                "The present nodes cannot hold 8 bundles in 2 logical node(s), even when nothing runs beside what it "
                "extends"
            )
            assert caught.value.report.nodes[0].total["CPU"] == 16
            assert (cluster.slots(), cluster.world_size()) == (before, 9)
            assert cluster.extend([7]) == (1,)

    def test_others_hold_it(self, hold_group):
        """`extend` waits for what others hold until its deadline; the advice names its own argument."""
        with hold_group([{"CPU": 10}]), RayVirtualCluster([4], use_gpus=False) as cluster:
            with assert_no_leaks(), pytest.raises(PlacementTimeoutError, match=r"wait longer \(timeout_s\)"):
                cluster.extend([4], timeout_s=0.5)
            assert read_indices(cluster) == [0] * 4

    def test_two_at_once(self, hold_group, pauses, eventually, start_extension):
        """A second change waits for the first, or fails by its own timeout."""
        with RayVirtualCluster([2], use_gpus=False) as cluster:
            with hold_group([{"CPU": 12}]):
                first = start_extension(cluster, 4)
                assert eventually(lambda: pauses, 60)
                for change in (lambda: cluster.extend([1], timeout_s=0.2), lambda: cluster.replace_lost_nodes(0.2)):
                    with pytest.raises(PlacementTimeoutError, match=r"Waited 0\.2 s: another thread .* \(timeout_s\)"):
                        change()
                second = start_extension(cluster, 2)
                assert read_indices(cluster) == [0, 0]
            assert (first.wait(), second.wait()) == ((1,), (2,))
            assert read_indices(cluster) == [0, 0, 1, 1, 1, 1, 2, 2]

    def test_a_shutdown_ends_an_extension(self, hold_group, pauses, eventually, start_extension):
        """A shutdown does not wait for an extension, which then fails and leaves nothing."""
        with hold_group([{"CPU": 12}]):
            cluster = RayVirtualCluster([2], use_gpus=False).reserve()
            extension = start_extension(cluster, 4, timeout_s=600)
            assert eventually(lambda: pauses, 60)
            cluster.shutdown()
            assert "was shut down in the meantime" in str(extension.wait())
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

    def test_any_extensions_and_releases(self):
        """Slots keep their order, additions come last, views keep their slots, and nodes are numbered in order."""
        random = Random(7)
        with RayVirtualCluster([2, 1], use_gpus=False) as cluster:
            model, views, count = list(cluster.slots()), [], 2
            for _ in range(12):
                used = sorted({slot.node_idx for slot in cluster.slots()})
                if len(model) < 8 or not used:
                    more = [random.randint(1, 3) for _ in range(2)]
                    assert cluster.extend(more) == (count, count + 1)
                    count += 2
                    model += cluster.slots()[len(model) :]
                    assert read_indices(cluster)[-sum(more) :] == [count - 2] * more[0] + [count - 1] * more[1]
                else:
                    gone = set(random.sample(used, random.randint(1, len(used))))
                    cluster.release_nodes(gone)
                    model = [slot for slot in model if slot.node_idx not in gone]
                keys = [slot.key for slot in model]
                assert [slot.key for slot in cluster.slots()] == keys
                assert [slot.local_rank for slot in cluster.slots()] == list(range(len(model)))
                assert (cluster.world_size(), cluster.node_count()) == (len(model), len(set(read_indices(cluster))))
                for view, wanted in views:
                    assert [slot.key for slot in view.slots()] == [key for key in wanted if key in keys]
                if model:
                    views.append((cluster.split([1] * len(model))[0], keys[:1]))

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
